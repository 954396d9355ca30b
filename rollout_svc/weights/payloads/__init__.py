"""What engines that are not ours have to be sent with new weights, each by its own protocol.

`pickling` writes what two of them unpickle; `lmdeploy`, `sglang` and `vllm` build the calls; `session` makes them.
"""

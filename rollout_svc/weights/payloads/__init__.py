"""What engines that are not ours have to be sent with new weights, each by its own protocol.

`pickling` writes what they unpickle; `lmdeploy`, `sglang` and `vllm` make the bodies of the calls, which the service
passes on (`engines/updates/`).
"""

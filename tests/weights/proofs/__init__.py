"""That every token's logprob is what the weights named for it say, whatever was updated meanwhile and how."""

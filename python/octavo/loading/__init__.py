"""Model files: where they are, what they say about the model, and the weights in them.

`resolve_model` turns a name into a `ModelSource`; `load_model_config` reads its description without torch;
`open_weights` (in `octavo.loading.weights`) maps its tensors.
"""

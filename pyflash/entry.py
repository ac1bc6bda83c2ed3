"""The functions of `api` and `packed`, which put them here for the glue that stands below them."""

forward = backward = run = varlen_forward = varlen_backward = None

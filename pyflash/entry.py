"""The functions of `api`, `packed` and `dispatch`, which put them here for the glue that stands below them."""

forward = backward = read = run = varlen_forward = varlen_backward = None

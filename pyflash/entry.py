"""The functions of `api`, for the glue that stands below them and is imported by them. `api` puts them here."""

forward = backward = None

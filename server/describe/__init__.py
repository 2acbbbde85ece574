"""The server described: OpenAPI document, API page, table of flags."""

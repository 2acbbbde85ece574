"""Documentation generated from the code: the OpenAPI document, docs/api.md, the README's table of flags."""

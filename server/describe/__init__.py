"""Documentation generated from the code: the OpenAPI document, docs/api.md, docs/settings.md."""

"""Requests nobody would send: made from the OpenAPI document, and by mutating valid ones."""

"""OpenAI's dialect: wire (what may be sent), convert (wire to engine), reply (engine to wire), routes."""

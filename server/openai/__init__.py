"""OpenAI's endpoints. A request goes through `wire.py` (what may be sent), `convert.py` (to engine requests) and
`reply.py` (engine events to the reply); `routes.py` joins them.
"""

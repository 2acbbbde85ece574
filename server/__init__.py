"""The HTTP side: OpenAI's API, some of llama-server's, the web page. Knows `engine.{api,settings,errors}`."""

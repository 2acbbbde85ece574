"""What each field of a request means, in one line: for the OpenAPI document and the generated page.

Types and ranges follow from the models that read the fields. A field of several models has one meaning, unless it
is listed for a model as `Model.field`.
"""

from __future__ import annotations

from collections.abc import Mapping

MEANINGS: Mapping[str, str] = {
    # what to continue
    "messages": "the conversation",
    "role": "who speaks; `developer` is `system` where the template knows no such role",
    "content": "a text, or a list of text parts",
    "Message.content": "a text, or a list of text parts; may be missing where the assistant called tools",
    "Tokenize.content": "the text",
    "Detokenize.tokens": "the token ids",
    "reasoning_content": "an earlier turn's reasoning, for templates that show it",
    "reasoning": "vLLM's name of `reasoning_content`",
    "Message.name": "who of that role speaks, for templates that show it",
    "Message.tool_calls": "calls an earlier turn of the assistant made",
    "tool_call_id": "the call that a tool's message answers",
    "prompt": "a text, token ids, or a list of either; each is continued by itself",
    "suffix": "what follows the gap to fill, for models with fill-in-the-middle tokens",
    "echo": "tell the prompt first; with `logprobs` its log-probabilities too, which are computed afresh",
    "model": "any name; the reply tells the one served",
    "add_generation_prompt": "end the prompt with the opening of the assistant's turn; on by default",
    "continue_final_message": "go on with the last message, which must be the assistant's",
    "chat_template_kwargs": "values for the template; names the renderer uses itself are refused",
    "reasoning_effort": "told to the template; `none` also switches thinking off",
    # how much
    "n": "choices per prompt, at most one per slot; choice i has the seed plus i",
    "max_tokens": "most tokens of a reply; -1: up to the context's end",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`; wins over it",
    "n_predict": "llama-server's name of `max_tokens`; the others win",
    "min_tokens": "nothing but the context's end ends the reply before so many tokens",
    "stop": "strings that end the reply; they are not part of it",
    "stop_token_ids": "tokens that end the reply like the model's own end tokens",
    "ignore_eos": "go on after end tokens",
    # sampling
    "temperature": "0: the likeliest token always",
    "top_k": "only the k likeliest tokens; 0 or -1: all",
    "top_p": "only the likeliest tokens that together have this probability; 1: all",
    "min_p": "only tokens at least this probable relative to the likeliest; 0: all",
    "repeat_penalty": "divides logits of tokens among the last `repeat_last_n`; 1: off",
    "repetition_penalty": "vLLM's name of `repeat_penalty`, which wins",
    "repeat_last_n": "window of the repeat penalty, prompt included",
    "presence_penalty": "taken off the logits of tokens the reply already has",
    "frequency_penalty": "taken off the logits of tokens for each time the reply already has them",
    "logit_bias": "added to the logits of tokens, by token id",
    "seed": "the same seed gives the same text, with speculation on or off; -1: drawn at random, and told",
    # form of the reply
    "response_format": "what the reply must be: text, any JSON object, or JSON of a schema",
    "json_schema": "a JSON schema that the reply must follow; llama-server's name",
    "grammar": "a grammar that the reply must follow, in GBNF or in llguidance's Lark dialect",
    "guided_json": "a JSON schema that the reply must follow; vLLM's older name",
    "guided_regex": "a regular expression that the whole reply must match",
    "guided_choice": "texts of which the reply must be one",
    "guided_grammar": "vLLM's older name of `grammar`",
    "structured_outputs": "what the reply must be, in vLLM's form",
    "tools": "functions the model may call",
    "tool_choice": "whether the model may, must or must not call tools, or which",
    "parallel_tool_calls": "false: one call at most",
    "logprobs": "tell the log-probability of each token",
    "CompletionRequest.logprobs": "so many of the likeliest tokens per token, with log-probabilities",
    "top_logprobs": "so many of the likeliest tokens per token; needs `logprobs`",
    "n_probs": "llama-server's name of `logprobs` and `top_logprobs` in one",
    "skip_special_tokens": "leave control tokens out of the text; on by default",
    "return_token_ids": "tell the ids of prompt and reply",
    "service_tier": "accepted; the reply then says `default`, the only one there is",
    # streaming
    "stream": "send the reply as server-sent events while it is made, one per step",
    "stream_options": "what else the stream tells",
    "include_usage": "a last chunk with the token counts",
    "continuous_usage_stats": "token counts so far in every chunk",
    "include_obfuscation": "accepted, without influence",
    # speculation and caching
    "speculative": "narrows for this request what the server has loaded",
    "types": "names of loaded drafters; `none`: plain decoding; `auto`: the server's",
    "n_max": "most drafted tokens in a step; above the server's it is lowered, and told",
    "n_min": "shorter drafts are thrown away",
    "p_min": "a model drafter stops where its own probability is below this",
    "ngram_size_n": "of the n-gram drafters: tokens that must match",
    "ngram_size_m": "of the n-gram drafters: most tokens copied",
    "ngram_min_hits": "of the n-gram drafters: earlier occurrences needed",
    "prediction": "text the reply is expected to resemble: what comes true of it is faster, the text stays the same",
    "Prediction.type": "the kind of prediction",
    "Prediction.content": "the text, or a list of pieces of it",
    "spec_detail": "tell which drafter guessed each token",
    "cache_prompt": "false: share no cached prompt with other requests",
    "cache_salt": "share cached prompts and slot files only with requests of the same salt",
    # llama-server's own endpoints
    "add_special": "add the tokens the model expects at a text's start",
    "parse_special": "read control tokens in the text as such",
    "with_pieces": "tell the text of each token too",
    "filename": "name of the file, without a folder",
}


def meaning(model: str, name: str) -> str | None:
    """The meaning of a field of a model, by their names."""
    return MEANINGS.get(f"{model}.{name}", MEANINGS.get(name))

// `ai` with `@ai-sdk/openai` (Responses) and `@ai-sdk/openai-compatible` (chat): text, streams, tools in several
// steps, objects, thinking, errors.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const baseURL = `${process.env.CLIENT_TEST_URL}/v1`;
const QUESTION = "Write the docstring:\n\ndef add(a, b):\n    return a + b";
const SHORT = { maxOutputTokens: 24, temperature: 0, maxRetries: 0 };
const LONG = { ...SHORT, maxOutputTokens: 400 };
const Finding = z.object({ name: z.string().max(12), count: z.number().int().min(0).max(99) });

/** What each provider sent, and `fetch` for loopback alone. */
const sent = [];
async function loopbackOnly(url, init) {
  assert.equal(new URL(url).hostname, "127.0.0.1", `the client wants to reach ${url}`);
  if (init?.body) sent.push(JSON.parse(init.body));
  return fetch(url, init);
}

async function listed(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

const settings = { baseURL, apiKey: "none", fetch: loopbackOnly };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({
  ...settings,
  name: "slipstream",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const MODELS = { responses: openai("demo"), chat: openai.chat("demo"), compatible: compatible("demo") };

function look(calls) {
  return tool({
    description: "looks it up",
    inputSchema: Finding,
    execute: async (input) => {
      calls.push(input);
      return { found: input.name };
    },
  });
}

/** A tool is forced in the first step and switched off in the second. */
const firstStepCalls = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });

for (const [name, model] of Object.entries(MODELS)) {
  test(`${name}: text`, async () => {
    const reply = await generateText({ model, prompt: QUESTION, system: "Be short.", ...SHORT });
    assert.ok(reply.text);
    assert.ok(["stop", "length"].includes(reply.finishReason), reply.finishReason);
    assert.ok(reply.usage.inputTokens > 0 && reply.usage.outputTokens > 0);
    assert.equal(reply.usage.totalTokens, reply.usage.inputTokens + reply.usage.outputTokens);
  });

  test(`${name}: a stream says the same`, async () => {
    const whole = await generateText({ model, prompt: QUESTION, ...SHORT });
    const stream = streamText({ model, prompt: QUESTION, ...SHORT });
    const pieces = await listed(stream.textStream);
    assert.ok(pieces.length > 1);
    assert.equal(pieces.join(""), whole.text);
    assert.equal(await stream.finishReason, whole.finishReason);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  test(`${name}: a tool in several steps`, async () => {
    const calls = [];
    const asked = { model, prompt: QUESTION, tools: { look: look(calls) }, stopWhen: stepCountIs(2), ...LONG };
    const reply = await generateText({ ...asked, prepareStep: firstStepCalls });
    assert.equal(reply.steps.length, 2);
    assert.equal(reply.steps[0].finishReason, "tool-calls");
    assert.equal(reply.steps[0].toolResults.length, calls.length);
    Finding.parse(calls[0]);
    assert.ok(reply.text);
  });

  test(`${name}: a tool in several steps of a stream`, async () => {
    const calls = [];
    const asked = { model, prompt: QUESTION, tools: { look: look(calls) }, stopWhen: stepCountIs(2), ...LONG };
    const stream = streamText({ ...asked, prepareStep: firstStepCalls });
    const parts = await listed(stream.fullStream);
    assert.deepEqual(parts.filter((part) => part.type === "error"), []);
    const inputs = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
    assert.ok(inputs.length > 1, "arguments come in pieces");
    Finding.parse(calls[0]);
    assert.equal((await stream.steps).length, 2);
  });

  test(`${name}: a conversation is sent again`, async () => {
    const first = await generateText({ model, prompt: QUESTION, ...SHORT });
    const messages = [{ role: "user", content: QUESTION }, ...first.response.messages];
    const second = await generateText({ model, messages: [...messages, { role: "user", content: "Again." }], ...SHORT });
    assert.ok(second.usage.inputTokens > first.usage.inputTokens + first.usage.outputTokens);
  });

  test(`${name}: an object`, async () => {
    const { object } = await generateObject({ model, prompt: QUESTION, schema: Finding, ...LONG });
    Finding.parse(object);
    const { output } = await generateText({
      model,
      prompt: QUESTION,
      output: Output.object({ schema: Finding }),
      ...LONG,
    });
    assert.deepEqual(output, object);
    const stream = streamObject({ model, prompt: QUESTION, schema: Finding, ...LONG });
    assert.ok((await listed(stream.partialObjectStream)).length > 1);
    assert.deepEqual(await stream.object, object);
  });

  test(`${name}: one of several, and a list`, async () => {
    const choice = await generateObject({ model, prompt: QUESTION, output: "enum", enum: ["yes", "no"], ...LONG });
    assert.ok(["yes", "no"].includes(choice.object));
    const list = Output.array({ element: z.enum(["a", "b"]) });
    const found = await generateText({ model, prompt: QUESTION, output: list, ...LONG }).catch((error) => error);
    assert.ok(Array.isArray(found.output) || found.finishReason === "length", String(found));
  });

  test(`${name}: errors`, async () => {
    const wrong = generateText({ model, prompt: QUESTION, ...SHORT, temperature: -1 });
    await assert.rejects(wrong, (error) => {
      assert.ok(APICallError.isInstance(error), String(error));
      assert.equal(error.statusCode, 400);
      assert.equal(error.isRetryable, false);
      assert.match(error.message, /temperature/);
      return true;
    });
    const parts = streamText({ model, prompt: "a ".repeat(9000), ...SHORT, onError() {} }).fullStream;
    const [failed] = (await listed(parts)).filter((part) => part.type === "error");
    assert.match(failed.error.message, /context|tokens/);
  });
}

test("responses: what is kept is referred to, and sent again where it is not", async () => {
  for (const store of [true, false]) {
    const asked = { model: MODELS.responses, ...SHORT, providerOptions: { openai: { store } } };
    const first = await generateText({ ...asked, prompt: QUESTION });
    sent.length = 0;
    const question = { role: "user", content: QUESTION };
    const messages = [question, ...first.response.messages, { role: "user", content: "Again." }];
    const second = await generateText({ ...asked, messages });
    assert.equal(sent[0].input[1].type === "item_reference", store);
    assert.ok(second.usage.inputTokens > first.usage.inputTokens + first.usage.outputTokens);
  }
});

test("responses: one goes on from another", async () => {
  const model = MODELS.responses;
  const first = await generateText({ model, prompt: QUESTION, ...SHORT });
  const openai = { previousResponseId: first.providerMetadata.openai.responseId };
  const second = await generateText({ model, prompt: "Again.", ...SHORT, providerOptions: { openai } });
  assert.ok(second.usage.inputTokens > first.usage.inputTokens + first.usage.outputTokens);
});

test("responses: log-probabilities", async () => {
  const openai = { logprobs: 2 };
  const reply = await generateText({ model: MODELS.responses, prompt: QUESTION, ...SHORT, providerOptions: { openai } });
  const [logprobs] = reply.providerMetadata.openai.logprobs;
  assert.equal(logprobs.map((one) => one.token).join(""), reply.text);
  assert.ok(logprobs.every((one) => one.top_logprobs.length === 2 && one.logprob <= 0));
});

test("plain completions", async () => {
  for (const model of [openai.completion("demo"), compatible.completionModel("demo")]) {
    assert.ok((await generateText({ model, prompt: "def add(a, b):\n", ...SHORT })).text);
    const stream = streamText({ model, prompt: "def add(a, b):\n", ...SHORT });
    assert.ok((await listed(stream.textStream)).length > 1);
  }
});

const THINKING = { ...settings, baseURL: `${process.env.CLIENT_TEST_THINKING_URL}/v1` };
const shown = { forceReasoning: true, reasoningSummary: "auto" };
const thinkers = {
  "responses that are kept": [createOpenAI(THINKING)("any"), shown],
  "responses that are not": [createOpenAI(THINKING)("any"), { ...shown, store: false }],
  compatible: [createOpenAICompatible({ ...THINKING, name: "slipstream" })("any"), {}],
};

for (const [name, [model, options]] of Object.entries(thinkers)) {
  test(`${name}: thinking is shown, and comes back with a tool's result`, async () => {
    const asked = { model, prompt: QUESTION, tools: { look: look([]) }, stopWhen: stepCountIs(2), maxRetries: 0 };
    const reply = await generateText({ ...asked, providerOptions: { openai: options } });
    assert.deepEqual(reply.steps.map((step) => step.reasoningText.trim()), ["I need it.", "I need it."]);
    assert.equal(reply.text, "You said: I need it.");
    const stream = streamText({ ...asked, providerOptions: { openai: options } });
    const parts = await listed(stream.fullStream);
    const thoughts = parts.filter((part) => part.type === "reasoning-delta").map((part) => part.text);
    assert.equal(thoughts.join("").replaceAll("\n", ""), "I need it.".repeat(2));
    assert.equal(await stream.text, "You said: I need it.");
  });
}

test("responses: a tool that takes a text", async () => {
  const provider = createOpenAI(THINKING);
  const inputs = [];
  const execute = async (input) => {
    inputs.push(input);
    return "done";
  };
  const asked = { prompt: QUESTION, tools: { look: provider.tools.customTool({ name: "look", execute }) } };
  for (const store of [true, false]) {
    const options = { ...shown, store };
    const more = { stopWhen: stepCountIs(2), maxRetries: 0, providerOptions: { openai: options } };
    const reply = await generateText({ model: provider("any"), ...asked, ...more });
    assert.equal(reply.text, "You said: I need it.");
    const stream = streamText({ model: provider("any"), ...asked, ...more });
    assert.equal(await stream.text, "You said: I need it.");
  }
  assert.deepEqual(inputs, Array(4).fill('{"name": "it", "count": 1}'));
});

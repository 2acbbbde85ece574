// `codex`, OpenAI's coding agent: a task for which it calls a tool of an MCP server, over Responses.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

const PROGRAM = new URL("node_modules/.bin/codex", import.meta.url).pathname;
const SETTINGS = (url, server) => `
model = "any"
model_provider = "here"
approval_policy = "never"
sandbox_mode = "danger-full-access"
model_reasoning_summary = "auto"
check_for_update_on_startup = false
[model_providers.here]
name = "here"
base_url = "${url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
[mcp_servers.here]
command = "${process.execPath}"
args = ["${server}"]
`;
// An MCP server with one tool, `look`.
const SERVER = `
import { createInterface } from "node:readline";
const inputSchema = { type: "object", properties: { name: { type: "string" }, count: { type: "integer" } } };
for await (const line of createInterface({ input: process.stdin })) {
  const { id, method, params } = JSON.parse(line);
  const results = {
    initialize: {
      protocolVersion: params?.protocolVersion,
      capabilities: { tools: {} },
      serverInfo: { name: "here", version: "1" },
    },
    "tools/list": { tools: [{ name: "look", description: "Looks it up.", inputSchema }] },
    "tools/call": { content: [{ type: "text", text: params?.arguments?.count + " of " + params?.arguments?.name }] },
  };
  if (id !== undefined) console.log(JSON.stringify({ jsonrpc: "2.0", id, result: results[method] ?? {} }));
}
`;

test("a task with a tool of an MCP server", () => {
  const home = mkdtempSync(join(tmpdir(), "codex-"));
  try {
    const [server, folder] = [join(home, "server.mjs"), join(home, "work")];
    mkdirSync(folder);
    writeFileSync(server, SERVER);
    writeFileSync(join(home, "config.toml"), SETTINGS(process.env.CLIENT_TEST_THINKING_URL, server));
    // Whatever it wants of other hosts fails at once.
    const nowhere = { HTTPS_PROXY: "http://127.0.0.1:9", HTTP_PROXY: "http://127.0.0.1:9", NO_PROXY: "127.0.0.1" };
    const told = execFileSync(PROGRAM, ["exec", "--skip-git-repo-check", "--json", "Look it up."], {
      cwd: folder,
      env: { ...process.env, ...nowhere, CODEX_HOME: home },
      stdio: ["ignore", "pipe", "ignore"],
      timeout: 120_000,
    });
    const events = told.toString().trim().split("\n").map((line) => JSON.parse(line));
    const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
    const of = (type) => items.filter((item) => item.type === type);
    const [call] = of("mcp_tool_call");
    assert.deepEqual([call.server, call.tool, call.arguments], ["here", "look", { name: "it", count: 1 }]);
    assert.equal(call.result.content[0].text, "1 of it");
    assert.deepEqual(of("reasoning").map((item) => item.text.trim()), ["I need it.", "I need it."]);
    assert.equal(of("agent_message").at(-1).text, "You said: I need it.");
    assert.equal(events.at(-1).type, "turn.completed");
    assert.ok(events.at(-1).usage.output_tokens > 0);
  } finally {
    rmSync(home, { recursive: true });
  }
});

// Builds app.js, style.css and LICENSES.txt from src/ into the folder given, by default beside this file. The bytes are
// the same on every machine: versions come from package-lock.json, and nothing of the place of the build is in them.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";
import { join } from "node:path";

const here = import.meta.dirname;
const out = process.argv[2] ?? here;
const BUNDLED = ["preact", "@preact/signals", "@preact/signals-core", "marked", "highlight.js"];

await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx", style: "src/style.css" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["chrome109", "firefox115", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none", // LICENSES.txt has them
  charset: "utf8",
  logLevel: "warning",
});

const parts = ["Libraries bundled in app.js, with their licences.\n"];
for (const name of BUNDLED) {
  const folder = join(here, "node_modules", name);
  const { version } = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  const text = await readFile(join(folder, "LICENSE"), "utf8");
  parts.push(`--- ${name} ${version} ---\n\n${text.replaceAll("\r\n", "\n").trim()}\n`);
}
await writeFile(join(out, "LICENSES.txt"), parts.join("\n"));

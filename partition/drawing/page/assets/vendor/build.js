/** Bundle index.js into ../vendor.js, and write the licences of every package in it to ../vendor.LICENSES.txt. */

import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const options = { entryPoints: ["index.js"], bundle: true, minify: true, charset: "utf8", format: "iife" };
const settings = { legalComments: "none", metafile: true, outfile: "../vendor.js", target: "es2020" };
const result = await build({ ...options, ...settings });

/** Packages that come inside the file of another (dagre's and d3-array's), and so are no inputs of their own. */
const INSIDE = ["node_modules/@dagrejs/graphlib", "node_modules/internmap"];

/** The folders of the packages in the bundle. */
function folders() {
  const inputs = Object.entries(Object.values(result.metafile.outputs)[0].inputs);
  const used = inputs.filter(([, input]) => input.bytesInOutput > 0).map(([path]) => path);
  const found = used.map((path) => path.match(/^node_modules\/(?:@[^/]+\/)?[^/]+/)?.[0]).filter(Boolean);
  return [...new Set([...found, ...INSIDE])].sort();
}

/** Packages under one licence text, each with its own copyright line: [text, lines][]. */
function grouped() {
  const groups = new Map();
  for (const folder of folders()) {
    const { name, version } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
    const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
    const text = readFileSync(`${folder}/${file}`, "utf8");
    const holders = text.match(/^Copyright.*$/gm).join("; ");
    const body = text.replace(/^Copyright.*$/gm, "").replace(/\n{3,}/g, "\n\n").trim();
    groups.set(body, [...(groups.get(body) ?? []), `${name} ${version}: ${holders}`]);
  }
  return [...groups];
}

const notices = grouped().map(([body, lines]) => `${lines.join("\n")}\n\n${body}\n`);
const text = notices.join(`\n${"-".repeat(80)}\n\n`);
writeFileSync("../vendor.LICENSES.txt", text);
writeFileSync("../vendor.js", `/*!\n${text}*/\n${readFileSync("../vendor.js", "utf8")}`);

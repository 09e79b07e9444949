// The page in a real browser, by hand: filters, links to cells, no JavaScript, widths, accessibility, paper.
//
//   npm install --prefix /tmp/browser playwright-core axe-core
//   NODE_PATH=/tmp/browser/node_modules node tests/reports/html/browser_check.mjs report.html [browser] [pictures]
//
// Ends with 1 where something is wrong. `pictures` is a folder for screenshots and a PDF.
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";

const require = createRequire(import.meta.url);
const { chromium } = require("playwright-core");
const axe = fs.readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const [file, executablePath = "/usr/bin/chromium", pictures] = process.argv.slice(2);
const url = `file://${path.resolve(file)}`;
const browser = await chromium.launch({
  executablePath,
  headless: true,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});
let problems = 0;

function check(good, text) {
  if (!good) problems += 1;
  console.log(`${good ? "ok  " : "BAD "} ${text}`);
}

async function open({ width = 1280, colorScheme = "light", javaScriptEnabled = true, bypassCSP = false, hash = "" } = {}) {
  const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, javaScriptEnabled, bypassCSP });
  const page = await context.newPage();
  page.on("console", (message) => check(false, `console: ${message.text()}`));
  page.on("pageerror", (error) => check(false, `error: ${error.message}`));
  page.on("request", (request) => {
    if (!/^(file|data):/.test(request.url())) check(false, `request: ${request.url()}`);
  });
  await page.goto(url + hash);
  return page;
}

const shown = (page) => page.$$eval("#matrix tbody tr:not([hidden])", (rows) => rows.length);
const picture = async (page, name) => pictures && page.screenshot({ path: path.join(pictures, `${name}.png`) });

let page = await open();
const [load] = await page.evaluate(() => performance.getEntriesByType("navigation").map((entry) => entry.loadEventEnd));
check(load < 2000, `opened in ${Math.round(load)} ms`);
const all = await shown(page);

// Filters agree with what the cells say.
for (const word of await page.$$eval("#f-verdict option", (options) => options.map((option) => option.value).filter(Boolean))) {
  await page.selectOption("#f-verdict", word);
  const [kind, name] = [word.slice(0, word.indexOf(":")), word.slice(word.indexOf(":") + 1)];
  const expected = await page.$$eval("#matrix tbody tr", (rows, [kind, name]) => rows.filter((row) =>
    [...row.querySelectorAll("[data-v]")].some((part) => kind === "any" ? part.classList.contains(name) : part.dataset.v === name),
  ).length, [kind, name]);
  check(await shown(page) === expected, `verdict ${word}: ${expected} cases`);
}
await page.click("#filters button[type=reset]");
await page.waitForFunction((count) => document.querySelectorAll("#matrix tbody tr:not([hidden])").length === count, all);
const tag = await page.$$eval("#f-tag option", (options) => options[1]?.value);
if (tag) {
  await page.selectOption("#f-tag", tag);
  const expected = await page.$$eval("#matrix tbody tr", (rows, tag) => rows.filter((row) => row.dataset.t.split(" ").includes(tag)).length, tag);
  check(await shown(page) === expected, `tag ${tag}: ${expected} cases`);
  await page.click("#filters button[type=reset]");
}
const framework = await page.$eval("#f-framework option:last-child", (option) => option.value);
await page.selectOption("#f-framework", framework);
const visible = await page.$$eval("#matrix thead tr:first-child", ([row]) => [...row.cells].slice(1).filter((cell) => getComputedStyle(cell).display !== "none").map((cell) => cell.dataset.f));
check(visible.length > 0 && visible.every((name) => name === framework), `framework ${framework}: ${visible.length} columns`);
await page.click("#filters button[type=reset]");

// A cell opens its details, by a click, by its address, and without JavaScript.
const link = page.locator("#matrix td a").first();
const hash = await link.getAttribute("href");
const stands = (page) => page.evaluate((id) => {
  const element = document.getElementById(id);
  const { top } = element.getBoundingClientRect();
  return element.closest("details").open && top >= 0 && top < innerHeight;
}, hash.slice(1));
await link.click();
await page.waitForTimeout(200);
check(await stands(page), `a click opens ${hash}`);
page = await open({ hash });
await page.waitForTimeout(200);
check(await stands(page), "so does its address");
page = await open({ hash, javaScriptEnabled: false });
check(await page.isVisible(`[id="${hash.slice(1)}"]`), "and without JavaScript");
check(!(await page.isVisible("#filters")) && !(await page.isVisible("#theme")), "without JavaScript no control is shown that would do nothing");

page = await open();
await page.click("#theme");
await page.click("#theme");
check(await page.evaluate(() => document.documentElement.dataset.theme) === "dark", "the theme can be chosen");

for (const width of [380, 768, 1280]) {
  page = await open({ width });
  await page.evaluate(() => { for (const one of [...document.querySelectorAll("details")].slice(0, 100)) one.open = true; });
  check(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${width} pixels: nothing runs over`);
  await picture(page, `width-${width}`);
}
for (const [colorScheme, width] of [["light", 1280], ["dark", 1280], ["light", 390]]) {
  page = await open({ colorScheme, width, bypassCSP: true });
  await picture(page, `${colorScheme}-${width}`);
  await page.evaluate(() => {
    for (const one of [...document.querySelectorAll("details")].slice(0, 60)) one.open = true;
    document.head.append(Object.assign(document.createElement("style"), { textContent: "*{content-visibility:visible!important}" }));
  });
  await page.addScriptTag({ content: axe });
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  check(violations.length === 0, `axe-core, ${colorScheme}, ${width} pixels: ${violations.length} violations`);
  for (const { id, nodes } of violations) console.log(`     ${id}: ${nodes.length} times, first ${nodes[0].html.slice(0, 160)}`);
}
page = await open();
const pdf = await page.pdf({ format: "A4", path: pictures && path.join(pictures, "paper.pdf") });
check(pdf.length > 0, `on paper: ${pdf.length} bytes`);
await browser.close();
process.exit(problems ? 1 : 0);

// The page put together: the admin key, the stream of states, tiles, tables and buttons.

import { json, states } from "./api.js";
import { Accounts } from "./accounts.js";
import { bar, button, element, table, tile } from "./parts.js";

const KEY = "lmkit.admin";
const THEME = "lmkit.theme";
const KEPT = 120; // states, one a second
const ACCOUNTS_SECONDS = 5;

const part = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const percent = (share) => (share === null ? "–" : `${Math.round(100 * share)}%`);
const milliseconds = (seconds) => (seconds === null ? "–" : `${number.format(1000 * seconds)} ms`);
const sum = (values) => values.reduce((a, b) => a + b, 0);

let history = [];
let key = keyOfAddress() ?? sessionStorage.getItem(KEY) ?? "";
const accounts = new Accounts(sure, tell);

function keyOfAddress() {
  const named = new URLSearchParams(location.hash.slice(1)).get("key");
  if (named === null) return null;
  window.history.replaceState(null, "", location.pathname); // out of the address, and of what is kept of it
  sessionStorage.setItem(KEY, named);
  return named;
}

function sure(text) {
  const dialog = part("sure");
  part("sure-text").textContent = text;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true }));
}

function tell(error) {
  part("notice").textContent = error.message;
  part("notice").hidden = false;
  if (error.status === 401 || error.status === 403) askForKey();
}

function askForKey() {
  part("content").hidden = true;
  part("key-form").hidden = false;
  part("key").focus();
}

/** Change something, and show an error if it cannot be. */
async function act(method, path) {
  try {
    part("notice").hidden = true;
    await json(key, method, path);
  } catch (error) {
    tell(error);
  }
}

/** What is drawn over time, of one state and the one before. */
function figures(state, before) {
  const requests = sum(state.models.map((model) => model.requests));
  const earlier = before && sum(before.models.map((model) => model.requests));
  const seconds = before ? state.time - before.time : 0;
  const known = state.nodes.filter((node) => node.healthy && node.latency_seconds !== null);
  const uses = state.nodes.map(kvUse).filter((use) => use !== null);
  return {
    rate: seconds > 0 ? Math.max(0, requests - earlier) / seconds : null,
    running: sum(state.nodes.map((node) => node.in_flight)),
    queued: sum(state.nodes.map((node) => node.queued_tokens)),
    latency: known.length ? sum(known.map((node) => node.latency_seconds)) / known.length : null,
    kv: uses.length ? Math.max(...uses) : null,
    hits: hitRate(state.nodes.map((node) => node.figures)),
  };
}

function kvUse(node) {
  return node.figures.kv_use ?? node.own_kv_use ?? null;
}

function hitRate(all) {
  const queries = sum(all.map((each) => each.queries ?? 0));
  return queries ? sum(all.map((each) => each.hits ?? 0)) / queries : null;
}

function show(state) {
  history = [...history, { ...state, figures: figures(state, history.at(-1)) }].slice(-KEPT);
  const now = history.at(-1).figures;
  const over = (name) => history.map((entry) => entry.figures[name]);
  const ready = state.nodes.filter((node) => node.healthy).length;
  part("state").textContent = `${ready} of ${state.nodes.length} nodes up, policy ${state.policy}`;
  part("tiles").replaceChildren(
    tile("Requests a second", now.rate === null ? "–" : number.format(now.rate), over("rate")),
    tile("Running requests", number.format(now.running), over("running")),
    tile("Tokens that wait", number.format(now.queued), over("queued")),
    tile("First byte", milliseconds(now.latency), over("latency")),
    tile("Fullest KV cache", percent(now.kv), over("kv"), 1),
    tile("Prefix cache hits", percent(now.hits), over("hits"), 1),
  );
  showNodes(state);
  const models = state.models.map((model) => [model.model, `${model.up} of ${model.nodes}`, number.format(model.requests), number.format(model.failed)]);
  table(part("models"), "Models", ["Model", "Nodes up", "Requests", "Failed"], models);
  const decisions = state.decisions.toReversed().map((made) => [
    new Date(1000 * made.at).toLocaleTimeString(), made.model, made.node, made.policy + (made.rule && `, rule ${made.rule}`),
    made.reason, number.format(made.tokens),
  ]);
  table(part("decisions"), "Decisions", ["Time", "Model", "Node", "Policy", "Reason", "Tokens"], decisions);
}

function showNodes(state) {
  const rows = state.nodes.map((node) => {
    const { running, waiting } = node.figures;
    const use = kvUse(node);
    return [
      element("span", { class: "node" }, node.url), stateOf(node), node.models.join(", "),
      number.format(running ?? node.in_flight), waiting === undefined ? "–" : number.format(waiting),
      use === null ? "–" : bar(use, percent(use), `KV cache of ${node.url}`), percent(hitRate([node.figures])),
      milliseconds(node.latency_seconds), number.format(node.requests), number.format(node.failovers + node.breaks),
      [drainButton(node), button("Remove", `Remove ${node.url}`, () => remove(node))],
    ];
  });
  const columns = ["Node", "State", "Models", "Running", "Waiting", "KV cache", "Hits", "First byte", "Requests", "Failed", "Actions"];
  table(part("nodes"), "Nodes", columns, rows);
}

function stateOf(node) {
  const text = node.draining ? "drains" : node.healthy ? "up" : "down";
  const breaker = node.breaker === "closed" ? "" : `breaker ${node.breaker} (${node.breaker_reason})`;
  const ramp = node.ramp < 1 ? `starts slowly at ${percent(node.ramp)}` : "";
  const more = [breaker, ramp, node.reason ?? ""].filter(Boolean).join("; ");
  return element("span", { class: `state ${text}` }, text + (more && `: ${more}`));
}

function drainButton(node) {
  const path = `admin/nodes/drain?url=${encodeURIComponent(node.url)}`;
  if (node.draining) return button("Use again", `Use ${node.url} again`, () => act("DELETE", path));
  return button("Drain", `Drain ${node.url}`, () => act("POST", path));
}

async function remove(node) {
  if (!(await sure(`Remove the node ${node.url}? Its running requests continue.`))) return;
  await act("DELETE", `admin/nodes?url=${encodeURIComponent(node.url)}`);
}

/** Follow the proxy for as long as the page is open. */
async function follow() {
  for (;;) {
    let seen = 0;
    try {
      for await (const state of states(key)) {
        if (!seen) part("notice").hidden = true;
        part("key-form").hidden = true;
        part("content").hidden = false;
        show(state);
        if (seen++ % ACCOUNTS_SECONDS === 0) await accounts.refresh(key);
      }
      part("state").textContent = "The proxy has ended the connection.";
    } catch (error) {
      part("state").textContent = "Not connected";
      tell(error);
      if (error.status === 401 || error.status === 403) return;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

part("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = part("key").value.trim();
  sessionStorage.setItem(KEY, key);
  part("key").value = "";
  part("notice").hidden = true;
  follow();
});
part("theme-button").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme === "dark"
    || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  localStorage.setItem(THEME, (document.documentElement.dataset.theme = isDark ? "light" : "dark"));
});
const theme = localStorage.getItem(THEME);
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
follow();

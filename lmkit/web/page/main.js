// The page's parts put together: what is asked, what is shown while an answer comes, keys and buttons.

import { ApiError, chunks, models } from "./api.js";
import { Attachments } from "./attach.js";
import { Settings } from "./settings.js";
import { messages, Tree } from "./tree.js";
import { copy, grow, isSubmit, View } from "./view.js";

const MODEL = "lmkit.model";
const THEME = "lmkit.theme";
const NEAR_END = 60; // pixels from the end of the conversation that count as its end

const part = (id) => document.getElementById(id);
const [scroll, prompt, select, notice, status] = ["scroll", "prompt", "model", "notice", "status"].map(part);
const view = new View(part("messages"), { again, edit, choose, answerCalls });
const settings = new Settings((name) => name === "key" && findModels());

const attached = new Attachments(part("attached"), { tell, used: imageChars, changed: showSend });
const seeing = new Set(); // the models that take images

let tree = Tree.kept();
let running = null; // {node, controller} of the answer that comes
let isFollowing = true; // the end of the conversation stays in sight

/** Let the model answer the conversation that ends with the node `parent`. */
async function answer(parent) {
  const fields = requestFields();
  if (!fields || running) return false;
  const node = tree.add(parent, { role: "assistant", model: select.value });
  const body = { ...fields, model: select.value, messages: messages(tree.pathTo(parent), settings.values.system?.trim()) };
  running = { node, controller: new AbortController() };
  isFollowing = true;
  render();
  const clock = timer();
  try {
    for await (const chunk of chunks(body, settings.key, running.controller.signal)) {
      take(chunk, node, clock);
      refresh();
    }
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
    if (!(error instanceof ApiError) && error.name !== "AbortError") console.error(error);
    if (error.status === 401) askForKey(error.message);
  }
  running = null;
  tree.keep();
  render();
  status.textContent = node.error ? "" : "The answer is complete.";
  return true;
}

function requestFields() {
  if (!select.value) {
    tell("There is no model to answer.");
    return null;
  }
  try {
    return settings.fields();
  } catch {
    tell("Settings: the further fields are not a JSON object.");
    return null;
  }
}

function timer() {
  const start = performance.now();
  return () => (performance.now() - start) / 1000;
}

/** Add a chunk to an answer. */
function take(chunk, node, clock) {
  const figures = (node.figures ??= { tokens: 0 });
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  const said = delta.content || delta.tool_calls?.length;
  if (thought || said) {
    figures.first ??= clock();
    figures.seconds = clock();
    if (!chunk.usage) figures.tokens += 1; // a server that does not count sends about a token each time
  }
  if (said && node.reasoning && figures.thought === undefined) figures.thought = clock() - figures.first;
  if (thought) node.reasoning = (node.reasoning ?? "") + thought;
  node.content += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) takeCall((node.calls ??= []), call);
  node.finish = choice?.finish_reason ?? node.finish;
  if (!chunk.usage) return;
  figures.tokens = chunk.usage.completion_tokens ?? figures.tokens;
  figures.prompt = chunk.usage.prompt_tokens;
  figures.cached = chunk.usage.prompt_tokens_details?.cached_tokens;
}

function takeCall(calls, { index = calls.length, id, function: made = {} }) {
  const call = (calls[index] ??= { id: "", name: "", arguments: "" });
  call.id ||= id ?? "";
  call.name += made.name ?? "";
  call.arguments += made.arguments ?? "";
}

let isDue = false;
/** Show the answer that comes, at most once a frame. */
function refresh() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    if (!running) return;
    view.update(running.node, tree, { isBusy: true, isLast: true });
    follow();
  });
}

function again(node) {
  answer(node.parent);
}

function edit(node, text) {
  if (running || !requestFields()) return false;
  const made = tree.add(node.parent, { role: "user", content: text, images: node.images });
  answer(made.id);
  return true;
}

function choose(node, by) {
  tree.choose(node.id, by);
  tree.keep();
  render();
}

function answerCalls(node, results) {
  if (running || !requestFields()) return;
  let parent = node.id;
  node.calls.forEach((call, i) => {
    parent = tree.add(parent, { role: "tool", callId: call.id, content: results[i] }).id;
  });
  answer(parent);
}

function send() {
  const text = prompt.value;
  if (running || isEmpty() || !requestFields()) return;
  tell("");
  const images = attached.take();
  const made = tree.add(tree.last.id, { role: "user", content: text, ...(images.length ? { images } : {}) });
  prompt.value = "";
  grow(prompt);
  answer(made.id);
}

function render() {
  const path = tree.path();
  view.show(path, tree, running?.node.id);
  part("welcome").hidden = path.length > 0;
  part("stop-button").hidden = !running;
  part("send-button").hidden = Boolean(running);
  showSend();
  part("export-button").disabled = path.length === 0;
  follow();
}

function isEmpty() {
  return !prompt.value.trim() && !attached.urls.length;
}

function showSend() {
  part("send-button").disabled = isEmpty();
}

/** The length of the conversation's images. */
function imageChars() {
  return tree.path().reduce((sum, node) => (node.images ?? []).reduce((all, url) => all + url.length, sum), 0);
}

function chooseModel() {
  const canSee = seeing.has(select.value);
  part("attach-button").hidden = !canSee;
  attached.allow(canSee);
}

function follow() {
  if (isFollowing) scroll.scrollTop = scroll.scrollHeight;
  part("down-button").hidden = isFollowing;
}

function tell(message) {
  notice.textContent = message;
  notice.hidden = !message;
}

async function findModels() {
  try {
    const found = await models(settings.key);
    const names = found.map(({ name }) => name);
    seeing.clear();
    for (const { name, images } of found) if (images) seeing.add(name);
    const wanted = localStorage.getItem(MODEL);
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === wanted)));
    select.disabled = names.length === 0;
    chooseModel();
    part("welcome-text").textContent = names.length ? `${select.value} answers here.` : "";
    tell(names.length ? "" : "No model is served at the moment.");
  } catch (error) {
    part("welcome-text").textContent = "";
    if (error.status === 401) askForKey("This server asks for an API key. Write it into the settings.");
    else tell(error.message);
  }
}

function askForKey(message) {
  tell(message);
  openSettings();
  part("field-key").focus();
}

function openSettings() {
  const panel = part("settings-panel");
  part("fields").replaceChildren(...settings.form());
  if (!panel.open) panel.showModal();
}

function newChat() {
  running?.controller.abort();
  tree = new Tree();
  attached.take();
  tree.keep();
  tell("");
  render();
  prompt.focus();
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme ?? "");
}

function turnTheme() {
  const isDark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
}

function saveChat() {
  const made = { model: select.value, ...settings.fields(), messages: messages(tree.path(), settings.values.system?.trim()) };
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(made, null, 2)], { type: "application/json" }));
  link.download = "chat.json";
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Keys that work anywhere on the page. */
function onKey(event) {
  if (part("settings-panel").open) return;
  if (event.key === "Escape") running?.controller.abort();
  const isTyping = event.target.matches("textarea, input, select");
  if (event.key === "/" && !isTyping) {
    event.preventDefault();
    prompt.focus();
  }
}

function onPromptKey(event) {
  if (isSubmit(event)) {
    event.preventDefault();
    send();
  }
  const last = tree.path().findLast((node) => node.role === "user");
  if (event.key === "ArrowUp" && !prompt.value && last && !running) {
    event.preventDefault();
    view.edit(last, tree);
  }
}

function connect() {
  part("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  prompt.addEventListener("keydown", onPromptKey);
  prompt.addEventListener("input", () => {
    grow(prompt);
    showSend();
  });
  scroll.addEventListener("scroll", () => {
    isFollowing = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < NEAR_END;
    part("down-button").hidden = isFollowing;
  });
  part("messages").addEventListener("click", (event) => {
    const target = event.target.closest("[data-copy]");
    if (target) copy(target, target.closest(".code").querySelector("code").textContent);
  });
  const actions = {
    "stop-button": () => running?.controller.abort(),
    "down-button": () => ((isFollowing = true), follow()),
    "theme-button": turnTheme,
    "settings-button": openSettings,
    "new-button": newChat,
    "reset-button": () => (settings.reset(), openSettings()),
    "export-button": saveChat,
  };
  for (const [id, act] of Object.entries(actions)) part(id).addEventListener("click", act);
  for (const found of document.querySelectorAll("button[title]")) found.setAttribute("aria-label", found.title);
  select.addEventListener("change", () => (localStorage.setItem(MODEL, select.value), chooseModel()));
  connectImages();
  document.addEventListener("keydown", onKey);
}

/** Images come by the button, from the clipboard, and by dropping them anywhere. */
function connectImages() {
  const input = part("attach-input");
  part("attach-button").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    attached.add([...input.files]);
    input.value = "";
  });
  prompt.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (files.length && attached.isOn) {
      event.preventDefault();
      attached.add(files);
    }
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault(); // no file replaces the page
    attached.add([...event.dataTransfer.files]);
  });
}

setTheme(localStorage.getItem(THEME) || null);
connect();
render();
findModels();
prompt.focus();

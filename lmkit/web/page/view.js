// The messages on the page. Each has a node of its own, which is made once and brought up to date.

import { codeBlock, element, show } from "./markdown.js";

const SVG = "http://www.w3.org/2000/svg";
const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const use = document.createElementNS(SVG, "use");
  use.setAttribute("href", `#${name}`);
  svg.append(use);
  return svg;
}

/** An attached image. `url` is a data: URL. */
export function thumbnail(url, i) {
  return element("img", { src: url, alt: `Image ${i + 1} of the message` });
}

function button(title, name, act, attributes = {}) {
  const made = element("button", { type: "button", class: "icon", title, "aria-label": title, ...attributes }, icon(name));
  made.addEventListener("click", act);
  return made;
}

export class View {
  /** `actions`: again(node), edit(node, text), choose(node, by), answerCalls(node, results). */
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
  }

  /** Show the messages of a path. */
  show(path, tree, busyId) {
    const before = new Map([...this.list.children].map((item) => [item.dataset.id, item]));
    const items = path.map((node) => {
      const item = before.get(String(node.id)) ?? this.item(node);
      this.update(node, tree, { isBusy: node.id === busyId, isLast: node === path.at(-1), item });
      return item;
    });
    this.list.replaceChildren(...items);
  }

  item(node) {
    const heading = element("h2", { class: "hidden" }, NAMES[node.role]);
    const parts = ["thought", "images", "text", "calls", "problem", "foot"].map((name) => element("div", { class: name }));
    const item = element("li", { class: node.role, "data-id": String(node.id) }, heading, ...parts);
    item.parts = Object.fromEntries(parts.map((part) => [part.className, part]));
    return item;
  }

  update(node, tree, { isBusy, isLast, item = this.itemOf(node) }) {
    if (item.editor) return;
    const { thought, images, text, calls, problem, foot } = item.parts;
    item.classList.toggle("busy", isBusy);
    item.classList.toggle("waits", isBusy && !node.content && !node.reasoning && !node.calls?.length);
    if (node.role === "assistant") show(text, node.content);
    else text.textContent = node.content;
    if (node.images && !images.firstChild) images.append(...node.images.map(thumbnail));
    this.reasoning(thought, node, isBusy);
    this.calls(calls, node, isLast && !isBusy);
    problem.textContent = node.error ?? "";
    const key = JSON.stringify([isBusy, tree.place(node.id), node.figures, node.finish]);
    if (foot.key !== key) foot.replaceChildren(...this.foot(node, tree, isBusy));
    foot.key = key;
  }

  itemOf(node) {
    return this.list.querySelector(`[data-id="${node.id}"]`);
  }

  reasoning(target, node, isBusy) {
    if (!node.reasoning) return target.replaceChildren();
    if (!target.firstChild) target.append(element("details", {}, element("summary"), element("div", { class: "text" })));
    const { firstChild: summary, lastChild: body } = target.firstChild;
    const isThinking = isBusy && !node.content && !node.calls?.length;
    const seconds = node.figures?.thought;
    const ended = seconds === undefined ? "Thoughts" : `Thought for ${seconds.toFixed(1)} s`;
    summary.textContent = isThinking ? "Thinking…" : ended;
    show(body, node.reasoning);
  }

  calls(target, node, canAnswer) {
    const key = JSON.stringify([node.calls, canAnswer]);
    if (target.key === key) return;
    target.key = key;
    const made = (node.calls ?? []).map(({ name, arguments: text }) => {
      const title = element("p", { class: "title" }, element("span", {}, "Calls ", element("b", {}, name || "…")));
      return element("div", { class: "call" }, title, codeBlock(pretty(text), "json"));
    });
    target.replaceChildren(...made);
    if (canAnswer && made.length) target.append(this.resultForm(node));
  }

  resultForm(node) {
    const fields = node.calls.map(({ name }, i) => {
      const field = element("textarea", { rows: "2", name: `result-${i}` });
      return [element("label", {}, element("span", {}, `Result of ${name}`), field), field];
    });
    const send = element("button", { class: "plain strong" }, "Send results");
    const form = element("form", { class: "results" }, ...fields.map(([label]) => label), send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.answerCalls(node, fields.map(([, field]) => field.value));
    });
    return form;
  }

  foot(node, tree, isBusy) {
    const made = [];
    const { index, count } = tree.place(node.id);
    if (count > 1) {
      const disabled = (is) => (is || isBusy ? { disabled: "" } : {});
      made.push(element("span", { class: "branches" },
        button("The version before", "before", () => this.actions.choose(node, -1), disabled(index === 0)),
        element("span", {}, `${index + 1}/${count}`),
        button("The next version", "after", () => this.actions.choose(node, 1), disabled(index === count - 1))));
    }
    if (!isBusy) {
      if (node.role === "user") made.push(button("Edit", "edit", () => this.edit(node, tree)));
      made.push(button("Copy", "copy", (event) => copy(event.currentTarget, node.content)));
      if (node.role === "assistant") made.push(button("Answer again", "again", () => this.actions.again(node)));
    }
    if (node.figures) made.push(element("span", { class: "figures" }, figures(node)));
    return made;
  }

  /** Let the user write a message anew. */
  edit(node, tree) {
    const item = this.itemOf(node);
    if (item.editor) return;
    const field = element("textarea", { "aria-label": "Message" });
    const cancel = element("button", { class: "plain", type: "button" }, "Cancel");
    const send = element("button", { class: "plain strong" }, "Send");
    item.editor = element("form", { class: "editor" }, field, element("div", { class: "title" }, cancel, send));
    const close = () => {
      item.editor.remove();
      item.editor = null;
      this.update(node, tree, { isBusy: false, isLast: false, item });
    };
    cancel.addEventListener("click", close);
    item.editor.addEventListener("submit", (event) => {
      event.preventDefault();
      if ((field.value.trim() || node.images?.length) && this.actions.edit(node, field.value)) close();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      if (isSubmit(event)) item.editor.requestSubmit();
      if (event.key === "Escape" || isSubmit(event)) event.preventDefault();
      event.stopPropagation();
    });
    field.addEventListener("input", () => grow(field));
    field.value = node.content;
    item.append(item.editor);
    grow(field);
    field.focus();
  }
}

/** Whether a key sends what was written: Enter, but not where it ends the choice of a character. */
export function isSubmit(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

/** Make a text field as high as its text. */
export function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function figures({ figures: { first, seconds, tokens, prompt, cached }, finish, model }) {
  const parts = [];
  if (tokens) parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
  const rate = (tokens - 1) / (seconds - first);
  if (tokens > 1 && seconds > first) parts.push(`${rate.toFixed(rate < 100 ? 1 : 0)} tokens/s`);
  if (first !== undefined) parts.push(`first after ${first.toFixed(2)} s`);
  if (prompt) parts.push(`prompt ${prompt}${cached ? ` (${cached} cached)` : ""}`);
  const ends = { length: "length limit", stopped: "stopped", content_filter: "filtered" };
  if (ends[finish]) parts.push(ends[finish]);
  if (model) parts.push(model);
  return parts.join(" · ");
}

/** Copy a text, and show on the button that it was done. */
export async function copy(target, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // A page over plain HTTP from another machine has no clipboard.
    const field = element("textarea", { class: "hidden" });
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    target.focus();
  }
  const before = [...target.childNodes];
  if (target.dataset.done) return;
  target.dataset.done = "yes";
  target.replaceChildren(target.classList.contains("icon") ? icon("done") : "Copied");
  setTimeout(() => {
    target.replaceChildren(...before);
    delete target.dataset.done;
  }, 1200);
}

// The settings: what a request has beside its messages. They stay in this browser, the API key only in this tab.

import { element } from "./markdown.js";

const KEPT = "lmkit.settings";
const KEY = "lmkit.key";
const number = (label, min, max, step, hint) => ({ label, type: "number", min, max, step, hint });

// Fields of a request by name; the names without a type of their own are no fields of a request.
const FIELDS = {
  key: { label: "API key", type: "password", hint: "If the server asks for one. It is kept in this tab only.", title: "Server" },
  system: { label: "System message", type: "text", hint: "What the model is told before the conversation.", title: "Conversation" },
  temperature: { ...number("Temperature", 0, 2, 0.05, "0 takes the most likely token."), title: "Sampling" },
  top_p: number("Top p", 0, 1, 0.01, "Only the most likely tokens of this total probability."),
  top_k: number("Top k", -1, 100000, 1, "Only this many of the most likely tokens."),
  min_p: number("Min p", 0, 1, 0.01, "Only tokens at least this likely, compared with the first."),
  max_tokens: number("Longest answer", 1, 1000000, 1, "In tokens."),
  frequency_penalty: number("Frequency penalty", -2, 2, 0.1, "Against tokens, by how often they were used."),
  presence_penalty: number("Presence penalty", -2, 2, 0.1, "Against tokens that were used."),
  repetition_penalty: number("Repetition penalty", 0.01, 10, 0.05, "1 is none."),
  seed: number("Seed", 0, Number.MAX_SAFE_INTEGER, 1, "Makes an answer repeatable."),
  more: {
    label: "Further fields",
    type: "text",
    hint: 'Added to each request, as JSON: {"tools": [...], "response_format": {...}, "stop": "."}',
    title: "More",
  },
};

export class Settings {
  constructor(changed) {
    this.values = {};
    try {
      this.values = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    } catch {
      // Unreadable settings are the defaults.
    }
    this.values.key = sessionStorage.getItem(KEY) ?? "";
    this.changed = changed;
  }

  set(name, value) {
    this.values[name] = value;
    if (name === "key") sessionStorage.setItem(KEY, value);
    const { key, ...others } = this.values;
    localStorage.setItem(KEPT, JSON.stringify(others));
    this.changed(name);
  }

  get key() {
    return (this.values.key ?? "").trim();
  }

  /** The fields of a request. Raises SyntaxError if the further fields are no JSON object. */
  fields() {
    const made = {};
    for (const [name, { type }] of Object.entries(FIELDS)) {
      const value = this.values[name];
      if (type === "number" && value !== "" && Number.isFinite(Number(value ?? NaN))) made[name] = Number(value);
    }
    const more = (this.values.more ?? "").trim();
    const parsed = more ? JSON.parse(more) : {};
    if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) throw new SyntaxError("no object");
    return { ...made, ...parsed };
  }

  /** The form's parts, filled in. */
  form() {
    const made = [];
    for (const [name, field] of Object.entries(FIELDS)) {
      if (field.title) made.push(element("h3", {}, field.title));
      made.push(this.row(name, field));
    }
    return made;
  }

  row(name, { label, type, hint, min, max, step }) {
    const [id, about] = [`field-${name}`, `about-${name}`];
    const shared = { id, "aria-describedby": about, name };
    const attributes = {
      text: { rows: "3", spellcheck: "false" },
      number: { type, min, max, step, placeholder: "default", inputmode: "decimal" },
      password: { type, autocomplete: "off", spellcheck: "false" },
    }[type];
    const input = element(type === "text" ? "textarea" : "input", { ...shared, ...attributes });
    input.value = this.values[name] ?? "";
    input.addEventListener("change", () => {
      const { badInput, rangeUnderflow, rangeOverflow } = input.validity;
      if (!badInput && !rangeUnderflow && !rangeOverflow) this.set(name, input.value);
    });
    const text = element("label", { for: id }, label);
    return element("div", { class: `field ${type}` }, text, input, element("small", { id: about }, hint));
  }

  reset() {
    for (const name of Object.keys(FIELDS)) if (name !== "key") this.set(name, "");
  }
}

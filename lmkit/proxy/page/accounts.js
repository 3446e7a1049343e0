// Keys, teams and budgets.

import { json } from "./api.js";
import { bar, button, element, table } from "./parts.js";

const part = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 4 });

export class Accounts {
  /** `sure(text)` asks the administrator; `tell(error)` shows an error. */
  constructor(sure, tell) {
    this.sure = sure;
    this.tell = tell;
    part("create-form").addEventListener("submit", (event) => this.create(event));
  }

  /** Bring both tables up to date. A proxy without a key store has none. */
  async refresh(key) {
    this.key = key;
    const [keys, teams] = await Promise.all(["keys", "teams"].map((name) => json(key, "GET", `admin/${name}`))).catch(
      (error) => (error.status === 404 ? [null, null] : Promise.reject(error)),
    );
    part("accounts").hidden = keys === null;
    if (keys === null) return;
    const rows = keys.data.map((entry) => [
      entry.name, entry.id, entry.team ?? "", state(entry), limits(entry), spent(entry),
      entry.revoked ? "" : button("Revoke", `Revoke ${entry.name}`, () => this.revoke(entry)),
    ]);
    table(part("keys"), "Keys", ["Key", "Id", "Team", "State", "Limits", "This month", "Actions"], rows);
    const shown = teams.data.map((entry) => [entry.name, limits(entry), spent(entry)]);
    table(part("teams"), "Teams", ["Team", "Limits", "This month"], shown);
    const select = part("create-form").elements.team;
    const names = ["", ...teams.data.map((entry) => entry.name)];
    if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
      select.replaceChildren(...names.map((name) => element("option", { value: name }, name || "none")));
    }
  }

  async create(event) {
    event.preventDefault();
    const form = event.target.elements;
    const body = { name: form.name.value };
    if (form.team.value) body.team = form.team.value;
    const [name, value] = form.limit.value.split("=");
    if (name) body.limits = { [name.trim()]: Number(value ?? NaN) };
    try {
      const made = await json(this.key, "POST", "admin/keys", body);
      part("made").hidden = false;
      part("made").querySelector("output").value = made.key;
      event.target.reset();
      await this.refresh(this.key);
    } catch (error) {
      this.tell(error);
    }
  }

  async revoke(entry) {
    if (!(await this.sure(`Revoke the key ${entry.name} (${entry.id})? This cannot be taken back here.`))) return;
    try {
      await json(this.key, "DELETE", `admin/keys?id=${encodeURIComponent(entry.id)}`);
      await this.refresh(this.key);
    } catch (error) {
      this.tell(error);
    }
  }
}

function state(entry) {
  if (entry.revoked) return "revoked";
  if (!entry.expires) return "active";
  return new Date(entry.expires) <= new Date() ? "expired" : `until ${entry.expires.slice(0, 10)}`;
}

function limits(entry) {
  return Object.entries(entry.limits).map(([name, most]) => {
    const left = entry.left[name];
    if (left === undefined) return element("div", {}, `${name}: ${number.format(most)}`);
    const used = most - left;
    const text = `${name}: ${number.format(used)} of ${number.format(most)}`;
    return element("div", {}, bar(most ? used / most : 1, text, `${entry.name}, ${name}`));
  });
}

function spent(entry) {
  const { requests, tokens, money } = entry.used.month;
  return `${number.format(requests)} requests, ${number.format(tokens)} tokens` + (money ? `, ${number.format(money)}` : "");
}

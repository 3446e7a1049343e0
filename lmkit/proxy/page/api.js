// The admin API: requests, and the stream of the proxy's state.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export async function request(key, method, path, body) {
  const headers = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...(body ? { "Content-Type": "application/json" } : {}) };
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), credentials: "omit", cache: "no-store" });
  } catch {
    throw new ApiError("The proxy does not answer.");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ApiError(String(told?.error?.message ?? `The proxy answered with status ${response.status}.`), response.status);
}

export async function json(...call) {
  return (await request(...call)).json();
}

/** The proxy's states as they come. Ends when the stream ends; raises ApiError. */
export async function* states(key) {
  const response = await request(key, "GET", "admin/events");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(() => ({ done: true }));
      if (done) return;
      const lines = (held + value).split("\n");
      held = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield JSON.parse(line.slice(5));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

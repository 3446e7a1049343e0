// OpenAI's API: the models, and an answer as it comes.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function request(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? body?.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(String(message), response.status);
}

/** The models, {name, images}: whether one takes images. Raises ApiError. */
export async function models(key) {
  const body = await (await request("v1/models", key)).json();
  return (body.data ?? []).map((entry) => ({
    name: String(entry.id),
    images: Array.isArray(entry.input_modalities) && entry.input_modalities.includes("image"),
  }));
}

/**
 * The chunks of a chat completion. Raises ApiError, also for an error event and for a stream that breaks off, and an
 * AbortError if `signal` stops it.
 */
export async function* chunks(body, key, signal) {
  const streamed = { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
  const response = await request("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(streamed),
    signal,
  });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(String(chunk.error.message ?? chunk.error));
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("The answer broke off.");
  }
  throw new ApiError("The answer broke off.");
}

/** The data of server-sent events. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const found = (held + value).split("\n");
      held = found.pop();
      for (const line of found) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

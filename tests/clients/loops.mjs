// Ten turns of tool calls by a library of npm, in the folder of the clients: `node --input-type=module - CLIENT URL TASK`.
// It runs the task with whole answers and again with streams, and prints as JSON which steps were called and what the
// last answer was.

const [client, url, task] = process.argv.slice(2)
const MODEL = 'demo'
const MOST_STEPS = 20

// model: a promise of a model of the AI SDK
function aiSdk(model) {
  return async (step, streamed) => {
    const { generateText, stepCountIs, streamText, tool } = await import('ai')
    const { z } = await import('zod')
    const tools = {
      step: tool({
        description: 'Run a step.',
        inputSchema: z.object({ number: z.number().int() }),
        execute: async ({ number }) => step(number),
      }),
    }
    const asked = { model: await model(), prompt: task, tools, stopWhen: stepCountIs(MOST_STEPS), maxRetries: 0 }
    if (!streamed) return (await generateText(asked)).text
    const failures = []
    const text = await streamText({ ...asked, onError: ({ error }) => failures.push(error) }).text
    if (failures.length) throw failures[0]
    return text
  }
}

async function ollama(step, streamed) {
  const { Ollama } = await import('ollama')
  const client = new Ollama({ host: url })
  const parameters = { type: 'object', properties: { number: { type: 'integer' } }, required: ['number'] }
  const tools = [{ type: 'function', function: { name: 'step', description: 'Run a step.', parameters } }]
  const messages = [{ role: 'user', content: task }]
  for (;;) {
    const found = await client.chat({ model: MODEL, messages, tools, stream: streamed })
    const message = { role: 'assistant', content: '', thinking: '', tool_calls: [] }
    for await (const part of streamed ? found : [found]) {
      message.content += part.message.content
      message.thinking += part.message.thinking ?? ''
      message.tool_calls.push(...(part.message.tool_calls ?? []))
    }
    messages.push(message)
    if (!message.tool_calls.length) return message.content
    for (const call of message.tool_calls) {
      messages.push({ role: 'tool', tool_name: call.function.name, content: step(call.function.arguments.number) })
    }
  }
}

const OPTIONS = { name: 'lmkit', baseURL: `${url}/v1`, apiKey: 'none' }
const LOOPS = {
  'ai-sdk': aiSdk(async () => (await import('@ai-sdk/openai-compatible')).createOpenAICompatible(OPTIONS)(MODEL)),
  'ai-sdk-openai': aiSdk(async () => (await import('@ai-sdk/openai')).createOpenAI(OPTIONS)(MODEL)),
  'ai-sdk-anthropic': aiSdk(async () => (await import('@ai-sdk/anthropic')).createAnthropic(OPTIONS)(MODEL)),
  'ollama-js': ollama,
}

const runs = []
for (const streamed of [false, true]) {
  const seen = []
  const step = (number) => {
    seen.push(number)
    return `RESULT ${number}`
  }
  runs.push({ seen, answer: await LOOPS[client](step, streamed) })
}
console.log(JSON.stringify(runs))

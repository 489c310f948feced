// An agent in JavaScript, with OpenAI's own client from npm, played into a slot. It needs nothing of this project.
//
//     npm install openai
//     rollout-buffer engine --port 30000
//     rollout-buffer serve --gateway-port 8890
//     node examples/proxy/openai_client.mjs JOB_ID [http://127.0.0.1:8890]
//
// The job is one of task type `external`, as for openai_agents.py. Two turns: one reply at once, one streamed.
import OpenAI from "openai";

const [job, gateway = "http://127.0.0.1:8890"] = process.argv.slice(2);

async function post(url, body) {
  const reply = await fetch(url, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });
  if (!reply.ok) throw new Error(`${url} answers ${reply.status}: ${await reply.text()}`);
  return reply.json();
}

const session = await post(`${gateway}/sessions`, { job_id: job });
const client = new OpenAI({ baseURL: session.base_url, apiKey: session.api_key });
const messages = [{ role: "user", content: session.instance.question }];

const first = await client.chat.completions.create({ model: session.model, messages });
messages.push(first.choices[0].message, { role: "user", content: "Are you sure?" });

let second = "";
for await (const chunk of await client.chat.completions.create({ model: session.model, messages, stream: true }))
  second += chunk.choices[0]?.delta?.content ?? "";

const reward = second.includes(session.instance.answer) ? 1 : 0;
const closed = await post(`${gateway}/sessions/${session.session_id}/close`, { reward });
console.log(JSON.stringify({ first: first.choices[0].message.content, second, ...closed }));

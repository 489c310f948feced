// What a job was started with.

import { path } from "./api.js";
import { h, show } from "./dom.js";
import { moment } from "./format.js";
import { fact, json, section } from "./parts.js";
import { jobHead } from "./view_job.js";

export function settingsView(stage, jobId) {
  const body = h("div");
  stage.poll(path(["jobs", jobId]), 10000, (job) => {
    show(
      body,
      h(
        "dl",
        { class: "facts" },
        fact("Task type", job.task_type),
        fact("Group size", job.group_size),
        fact("Instances", job.instances),
        fact("Epochs", job.epochs),
        fact("Started", moment(job.created_at)),
        fact("Ended", moment(job.finished_at)),
      ),
      section("Engine", h("p", null, h("code", null, job.engine_url ?? "none: it is filled from outside"))),
      section("Settings", json(job.settings)),
    );
  });
  return { title: `Settings of ${jobId}`, element: h("div", null, jobHead(jobId, "Settings"), body) };
}

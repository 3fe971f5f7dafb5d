#!/usr/bin/env python3
"""Writes dashboards/*.json beside this file: what Grafana loads, from the short descriptions below.

A dashboard answers three questions in this order: is it healthy, what waits for what, who is starving. Queries take the
Prometheus operator's labels (namespace, job, pod); where a Prometheus has no such label, the variable "All" fits its absence.
"""

import json
import pathlib

DIRECTORY = pathlib.Path(__file__).parent / "dashboards"
COLUMNS = 24
STAT = {"w": 4, "h": 4}
GRAPH = {"w": 8, "h": 8}

RANGE = "[$__rate_interval]"


def selector(matchers):
    """{"a": "x", "b": "!y", "c": "~z"} as PromQL writes it."""
    operators = {"!": "!=", "~": "=~"}
    return "{" + ", ".join(f'{label}{operators.get(value[0], "=")}"{value.lstrip("!~")}"' for label, value in matchers.items()) + "}"


def where(**more):
    """Of the programs this dashboard is about."""
    return selector({"namespace": "~$namespace", "job": "~$job", "pod": "~$pod", **more})


def run(**more):
    """Of any program of the namespaces: for metrics whose name says whose they are."""
    return selector({"namespace": "~$namespace", **more})


def rate(metric, by="", of=None):
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{of or where()}{RANGE}))"


def mean(histogram, of=None):
    return f"{rate(histogram + '_sum', of=of)} / {rate(histogram + '_count', of=of)}"


def quantile(q, histogram, of=None):
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', 'le', of)})"


def quantiles(name, histogram, of=None):
    return [(quantile(q, histogram, of), f"{name} p{q * 100:g}".strip()) for q in (0.5, 0.95)]


def stat(title, expr, help_text, unit="short", bad=None, decimals=None):
    """One number. `bad`: (value, colour) steps above the green; with a "<" first they colour what is below."""
    steps = [{"color": "green", "value": None}]
    if bad and bad[0] == "<":
        steps = [{"color": "red", "value": None}, {"color": "green", "value": bad[1]}]
    elif bad:
        steps += [{"color": colour, "value": value} for value, colour in bad]
    defaults = {"unit": unit, "thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "thresholds"}}
    if decimals is not None:
        defaults["decimals"] = decimals
    return {"type": "stat", "title": title, "description": help_text, **STAT, "queries": [(expr, "")], "defaults": defaults,
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "graphMode": "none"}}


def graph(title, queries, help_text, unit="short", stacked=False, limit=None, low=0, high=None):
    """Curves over time. `limit`: (value, colour) drawn as a line where the number begins to mean trouble."""
    custom = {"lineWidth": 1, "fillOpacity": 40 if stacked else 8, "showPoints": "never",
              "stacking": {"mode": "normal" if stacked else "none"}}
    steps = [{"color": "transparent", "value": None}]
    if limit:
        steps.append({"color": limit[1], "value": limit[0]})
        custom["thresholdsStyle"] = {"mode": "line"}
    defaults = {"unit": unit, "custom": custom, "thresholds": {"mode": "absolute", "steps": steps}, "color": {"mode": "palette-classic"}}
    if low is not None:
        defaults["min"] = low
    if high is not None:
        defaults["max"] = high
    return {"type": "timeseries", "title": title, "description": help_text, **GRAPH, "queries": queries, "defaults": defaults,
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}}


def machine(disks=False):
    """What every program exports of its process, its container and its machine."""
    panels = [
        graph("CPU", [(rate("process_cpu_seconds_total", "pod"), "{{pod}}")], "Cores each pod uses.", "short"),
        graph("Memory", [(f"max by (pod) (process_resident_memory_bytes{where()})", "{{pod}}")],
              "Resident memory of each pod's program. Near the container's limit the kernel kills it.", "bytes"),
        graph("Stalled for want of a resource", [
            (f"sum by (pod, resource) (rate(moerl_pressure_stalled_seconds_total{where(tasks='some')}{RANGE}))", "{{pod}} {{resource}}")],
            "Share of time in which some task waited for CPU, memory or disk (pressure stall information). Memory above a few per cent: "
            "raise the limit before the kernel kills. Needs a kernel with PSI.", "percentunit", limit=(0.5, "orange")),
    ]
    if disks:
        panels.append(graph("Disks: free", [(f"min by (pod, volume) (moerl_disk_free_bytes{where()} / moerl_disk_size_bytes{where()})",
                                             "{{pod}} {{volume}}")],
                            "Free share of the volume. Full, the program stops rather than lose anything; grow the volume in time.",
                            "percentunit", limit=(0.1, "red"), high=1))
    return panels


TRAINER = [
    ("Is it healthy?", [
        stat("Steps done", f"max(moerl_trainer_step{where()}) / max(moerl_trainer_num_steps{where()})", "Of the steps in the run.", "percentunit"),
        stat("Ranks up", f"count(up{where()} == 1) / max(moerl_trainer_ranks{where()})",
             "One lost rank ends the step; all start again from the checkpoint.", "percentunit", ("<", 1)),
        stat("Last step", f"time() - max(moerl_trainer_last_step_timestamp_seconds{where()})", "Time since the last step ended.", "s",
             [(600, "orange"), (1800, "red")], decimals=0),
        stat("Mismatch", f"max(moerl_trainer_max_abs_mismatch{where()})",
             "Largest |trainer - rollout| log-probability of the last step. Anything but 0: the two sides do not run the same numbers.",
             bad=[(1e-12, "red")]),
        stat("Groups lost", f'sum(moerl_trainer_groups_dropped_total{where(reason="!no_signal")})',
             "Groups dropped because their verifier failed or a fork left them behind.", bad=[(1, "orange"), (100, "red")]),
        stat("Pass rate", f"max(moerl_trainer_pass_rate{where()})", "Of the last step's samples.", "percentunit", decimals=1),
    ]),
    ("What waits for what?", [
        graph("Where the time goes", [(rate("moerl_trainer_phase_seconds_total", "phase"), "{{phase}}")],
              "waiting: rollouts are too slow, or too few. publishing: weight_sync or its disk. checkpointing: the shared volume.",
              "percentunit", stacked=True, high=1),
        graph("Rollout servers", [(f"max(moerl_trainer_rollouts_wanted{where()})", "wanted"),
                                  (f"max(moerl_trainer_rollouts_connected{where()})", "connected")],
              "wanted: as many as would keep the trainer busy; what the autoscaler follows. connected: those that said hello."),
        graph("A step", [(mean("moerl_trainer_step_seconds"), "step"), (mean("moerl_trainer_wait_seconds"), "of it waiting for samples")],
              "Mean seconds.", "s"),
        graph("Groups on their way", [(f'sum by (state) (moerl_trainer_groups{where(state="~open|finished")})', "{{state}}"),
                                      (f"max(moerl_trainer_leases{where()})", "leased")],
              "open: admitted, not all samples there. leased: of those, at work on a connected server. finished: waiting for their step."),
        graph("Samples", [(rate("moerl_trainer_samples_total", "outcome"), "{{outcome}}"), (rate("moerl_trainer_leases_expired_total"), "leases expired")],
              "A second. failed: the verifier. refused: a rollout broke a rule. superseded: done twice after a lease moved.", "ops"),
        graph("Staleness", [(f"max(moerl_trainer_staleness_max{where()})", "oldest"), (f"max(moerl_trainer_staleness_mean{where()})", "mean"),
                            (f"max(moerl_trainer_staleness_bound{where()})", "bound")],
              "Age of trained tokens in versions. At the bound all the time: rollouts work ahead as far as they may."),
    ]),
    ("Who is starving?", machine(disks=True)),
    ("Does it learn?", [
        graph("Reward", [(f"max(moerl_trainer_reward_mean{where()})", "reward"), (f"max(moerl_trainer_pass_rate{where()})", "pass rate")],
              "Means of the last step.", low=None),
        graph("Policy", [(f"max(moerl_trainer_entropy{where()})", "entropy"), (f"max(moerl_trainer_kl_reference{where()})", "KL to reference"),
                         (f"max(moerl_trainer_clip_fraction{where()})", "clipped")],
              "An entropy that falls to 0 early: the policy collapses.", low=None),
        graph("Gradient", [(f"max(moerl_trainer_grad_norm{where()})", "norm"),
                           (f"sum(increase(moerl_trainer_steps_skipped_total{where()}{RANGE}))", "updates skipped")],
              "Before clipping. Skipped: not finite."),
        graph("Trained tokens", [(rate("moerl_trainer_tokens_total"), "trained"), (rate("moerl_trainer_tokens_compared_total"), "compared with the rollout")],
              "A second. The mismatch above is measured on those compared.", "short"),
        graph("Responses", [(f"max(moerl_trainer_response_length_mean{where()})", "mean tokens")], "Length of the samples."),
        graph("Groups without signal", [(f"max(moerl_trainer_zero_variance_groups{where()})", "all rewards equal")],
              "Of the last step. All of them: the task is too hard or too easy."),
    ]),
]

ROLLOUTS = [
    ("Is it healthy?", [
        stat("Ready", f"sum(moerl_server_ready{where()})", "Servers that accept work.", bad=("<", 1)),
        stat("Wanted", f"max(moerl_trainer_rollouts_wanted{run()})", "Servers that would keep the trainer busy: its own measure."),
        stat("Connected", f"sum(moerl_rollout_trainer_connected{where()}) / count(moerl_rollout_trainer_connected{where()})",
             "Share of servers that the trainer has welcomed.", "percentunit", ("<", 1)),
        stat("Versions behind", f"clamp_min(max(moerl_trainer_weight_version{run()}) - min(moerl_rollout_weight_version{where()} >= 0), 0)",
             "The server furthest behind the newest version; with steps shorter than a scrape also what was published between two scrapes.", bad=[(6, "orange"), (20, "red")]),
        stat("No valid reward", f"sum(moerl_rollout_judge_failures_total{where()})", "Samples that the environment could not judge.",
             bad=[(1, "orange"), (100, "red")]),
        stat("Tokens a second", rate("moerl_rollout_generation_tokens_total"), "Sampled by all servers."),
    ]),
    ("What waits for what?", [
        graph("Leased samples", [(f"sum by (state) (moerl_rollout_samples{where()})", "{{state}}"), (f"sum(moerl_rollout_num_slots{where()})", "slots")],
              "waiting: for weights that they may sample from, or for room. judged: for the environment. Far below the slots: for the trainer."),
        graph("Busy", [(rate("moerl_rollout_busy_seconds_total", "pod"), "{{pod}}")],
              "Share of time inside steps of the engine. Low with samples waiting for judgement: more environments. Low with few samples: "
              "the trainer is the bottleneck.", "percentunit", high=1),
        graph("Time in the queue", quantiles("", "moerl_rollout_request_queue_time_seconds"), "A sample's wait for its first place in the batch.", "s"),
        graph("Judging", quantiles("", "moerl_rollout_judge_seconds"), "From a sample's end to its reward.", "s"),
        graph("Batch", [(f"sum by (pod) (moerl_rollout_num_requests_running{where()})", "{{pod}} running"),
                        (f"sum by (pod) (moerl_rollout_num_requests_waiting{where()})", "{{pod}} waiting")], "Samples in the engine, Generate calls included."),
        graph("KV cache", [(f"max by (pod) (moerl_rollout_kv_cache_usage_perc{where()})", "{{pod}}")],
              "Pages in use. Near 1 samples are preempted and computed again.", "percentunit", limit=(0.95, "orange"), high=1),
    ]),
    ("Who is starving?", machine()),
    ("How fast?", [
        graph("Tokens a second", [(rate("moerl_rollout_generation_tokens_total", "pod"), "{{pod}}")], "Sampled."),
        graph("Between two tokens", quantiles("", "moerl_rollout_inter_token_latency_seconds"), "Of a sample.", "s"),
        graph("First token, whole sample", quantiles("first", "moerl_rollout_time_to_first_token_seconds") +
              quantiles("whole", "moerl_rollout_e2e_request_latency_seconds"), "From joining the queue.", "s"),
        graph("Tokens a step", [(mean("moerl_rollout_iteration_tokens"), "mean")], "Samples that decode together."),
        graph("Computed again or saved", [
            (rate("moerl_rollout_num_preemptions_total"), "preempted"), (rate("moerl_rollout_recomputed_samples_total"), "rebuilt for new weights"),
            (f"{rate('moerl_rollout_prefix_cache_hits_total')} / {rate('moerl_rollout_prefix_cache_queries_total')}", "prompt tokens shared (share)")],
            "Samples a second that lost their KV cache; share of prompt tokens that a shared prefill served."),
        graph("Ended", [(rate("moerl_rollout_request_success_total", "finished_reason"), "{{finished_reason}}")],
              "Samples a second. length: cut off by max_new_tokens.", "ops"),
    ]),
    ("New weights", [
        graph("Version", [(f"max by (pod) (moerl_rollout_weight_version{where()})", "{{pod}}")], "That samples.", low=None),
        graph("Getting a version", quantiles("fetched and verified", "moerl_weights_stage_seconds") + quantiles("packed", "moerl_rollout_pack_seconds"),
              "Beside sampling.", "s"),
        graph("Pause", quantiles("", "moerl_rollout_flip_seconds"), "In which weights change and nothing is sampled.", "s"),
    ]),
]

STORE_SHARE = f"max(moerl_weight_sync_store_bytes{where()}) / max(moerl_weight_sync_store_bytes_max{where()})"
WEIGHTS = [
    ("Is it healthy?", [
        stat("Newest version", f"max(moerl_weight_sync_newest_version{where()})", "READY: all of it stored and verified."),
        stat("Its age", f"time() - max(moerl_weight_sync_newest_version_timestamp_seconds{where()})", "Since the last publish.", "s",
             [(600, "orange"), (1800, "red")], decimals=0),
        stat("Versions behind", f"clamp_min(max(moerl_weight_sync_newest_version{where()}) - min(moerl_rollout_weight_version{run()} >= 0), 0)",
             "The rollout server furthest behind.", bad=[(6, "orange"), (20, "red")]),
        stat("Damaged chunks", f"sum(moerl_weight_sync_verify_failures_total{where()}) + sum(moerl_weights_verify_failures_total{run()})",
             "Whose bytes were not what their name says, on disk or on arrival. Fetched again, never used.", bad=[(1, "red")]),
        stat("Store", STORE_SHARE, "Bytes kept, of weight_sync.store_bytes_max.", "percentunit", [(0.8, "orange"), (0.95, "red")], decimals=1),
        stat("Disk free", f'min(moerl_disk_free_bytes{where(volume="store")} / moerl_disk_size_bytes{where(volume="store")})',
             "Of the store's volume. Full: publishing waits, nothing is lost.", "percentunit", ("<", 0.1)),
    ]),
    ("What waits for what?", [
        graph("A version's way, mean", [
            (mean("grpc_server_handling_seconds", where(grpc_method='PutChunks')), "put by the trainer"),
            (mean("grpc_server_handling_seconds", where(grpc_method='CommitVersion')), "committed"),
            (mean("moerl_weights_fetch_seconds", run()), "fetched by rollouts"), (mean("moerl_rollout_pack_seconds", run()), "packed"),
            (mean("moerl_rollout_flip_seconds", run()), "flipped")],
            "Seconds of each part between a step of the trainer and the first token of its version.", "s"),
        graph("Publishing", [(f'sum(rate(moerl_trainer_phase_seconds_total{run(phase="publishing")}{RANGE}))', "trainer publishing")],
              "Share of the trainer's time. It trains nothing meanwhile.", "percentunit", limit=(0.3, "orange"), high=1),
        graph("Versions", [(f"sum by (state) (moerl_weight_sync_versions{where()})", "{{state}}")], "staging for long: a publisher is stuck."),
        graph("Readers", [
            (f'sum(grpc_server_started_total{where(grpc_method="WatchVersions")})'
             # A method has no count of calls that ended before one has.
             f' - (sum(grpc_server_handled_total{where(grpc_method="WatchVersions")}) or vector(0))', "watching"),
            (f"sum(moerl_weight_sync_leases{where()})", "leases")], "Who follows the versions; versions held for fetches on their way."),
        graph("Calls", [(rate("grpc_server_handled_total", "grpc_code"), "{{grpc_code}}")], "Ended a second, by status.", "ops"),
        graph("Versions by server", [(f"max by (pod) (moerl_rollout_weight_version{run()})", "{{pod}}"),
                                     (f"max(moerl_weight_sync_newest_version{where()})", "newest")], "A server that stays behind samples what may be too old.",
              low=None),
    ]),
    ("Who is starving?", [
        graph("Bytes", [(rate("moerl_weight_sync_put_bytes_total"), "from publishers"), (rate("moerl_weight_sync_fetched_bytes_total"), "to readers")],
              "Of chunks, a second.", "Bps"),
        graph("Fetched by server", [(rate("moerl_weights_fetched_bytes_total", "pod", run()), "{{pod}}")], "Bytes a second.", "Bps"),
    ] + machine(disks=True)),
]

EP = [
    ("Is it healthy?", [
        stat("Ranks up", f"count(up{where()} == 1) / max(moerl_trainer_ranks{run()})", "Of the ranks that compute a step.", "percentunit", ("<", 1)),
        stat("Peers watched", f"min(moerl_fabric_peers{where()})", "By the rank that sees the fewest.", bad=("<", 1)),
        stat("Peers lost", f"sum(moerl_fabric_peers_lost_total{where()})", "Since the processes started.", bad=[(1, "red")]),
        stat("Operations failed", f"sum(moerl_ep_failures_total{where()})", "Dispatches and combines that ended in an error.", bad=[(1, "red")]),
        stat("Restarts in an hour", f"sum(changes(process_start_time_seconds{where()}[1h]))", "Of the pods: a lost rank restarts them all.",
             bad=[(1, "orange"), (4, "red")]),
        stat("Imbalance", f"max({rate('moerl_ep_rows_received_total', 'pod')}) / avg({rate('moerl_ep_rows_received_total', 'pod')})",
             "Rows of the most loaded rank over the mean: the others wait for it.", bad=[(1.5, "orange"), (3, "red")], decimals=2),
    ]),
    ("What waits for what?", [
        graph("Time spent waiting", [(rate("moerl_ep_wait_seconds_sum", "pod"), "{{pod}}")],
              "Share of time a rank waits for dispatch or combine. The rank that waits least is the one the others wait for.", "percentunit"),
        graph("Dispatch: wait", quantiles("", "moerl_ep_wait_seconds", where(operation='dispatch')), "Of one operation.", "s"),
        graph("Combine: wait", quantiles("", "moerl_ep_wait_seconds", where(operation='combine')), "Of one operation.", "s"),
        graph("Without credit", [(rate("moerl_ep_stalled_seconds_total", "pod"), "{{pod}}")],
              "Seconds a second, of all links together, in which a message was ready and the receiver had no slot free: it is slow to take.", "percentunit"),
        graph("Heartbeats", quantiles("", "moerl_fabric_heartbeat_gap_seconds") + [(quantile(0.999, "moerl_fabric_heartbeat_gap_seconds"), "p99.9")],
              "Between two beats of a peer. A peer is lost after fabric.heartbeat_timeout_ms.", "s"),
        graph("Operations", [(f"sum by (operation) (rate(moerl_ep_wait_seconds_count{where()}{RANGE}))", "{{operation}}")], "A second, all ranks.", "ops"),
    ]),
    ("Who is loaded, who is idle?", [
        graph("Rows received", [(rate("moerl_ep_rows_received_total", "pod"), "{{pod}}")], "By the rank's experts, a second."),
        graph("Tokens dispatched", [(rate("moerl_ep_tokens_total", "pod"), "{{pod}}")], "A second."),
        graph("Experts", [(f"max(moerl_trainer_expert_load_max_over_mean{run()})", "most loaded over mean"),
                          (f"max(moerl_trainer_dead_experts{run()})", "without a token")], "The worst layer of the last step."),
    ]),
    ("Links", [
        graph("Sent", [(rate("moerl_ep_sent_bytes_total", "over, kind"), "{{over}} {{kind}}")], "Bytes a second: memory inside a node, network between nodes.", "Bps"),
        graph("Network", [(f'sum by (pod) (rate(moerl_network_transmit_bytes_total{where()}{RANGE}))', "{{pod}}")],
              "Bytes a second by the kernel's interfaces. EFA's own traffic is not among them.", "Bps"),
        graph("Shared memory free", [(f"min by (pod) (moerl_shm_free_bytes{where()})", "{{pod}}")], "Of /dev/shm, where ranks of one node meet.", "bytes"),
    ]),
    ("Who is starving?", machine()),
]

# name: (title, a metric that only the programs of this dashboard export, rows)
DASHBOARDS = {
    "trainer": ("moerl / trainer", "moerl_trainer_phase", TRAINER),
    "rollouts": ("moerl / rollouts", "moerl_rollout_num_slots", ROLLOUTS),
    "weights": ("moerl / weights", "moerl_weight_sync_newest_version", WEIGHTS),
    "ep": ("moerl / expert parallelism", "moerl_ep_tokens_total", EP),
}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def variable(name, query, all_value=None):
    """Without `all_value` "All" is every value that the query finds."""
    return {"name": name, "label": name, "type": "query", "datasource": DATASOURCE, "query": {"query": query, "refId": name}, "refresh": 2,
            "multi": True, "includeAll": True, "allValue": all_value, "sort": 1, "current": {"text": "All", "value": "$__all"}}


def panels_of(rows):
    """Lays the panels out: each row's title, then its panels from left to right."""
    y, number, result = 0, 0, []
    for title, panels in rows:
        number += 1
        result.append({"id": number, "type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y, x, height = y + 1, 0, 0
        for panel in panels:
            if len(panels) == 4:  # in one line
                panel = {**panel, "w": COLUMNS // 4}
            if x + panel["w"] > COLUMNS:
                x, y = 0, y + height
            number += 1
            result.append({"id": number, "type": panel["type"], "title": panel["title"], "description": panel["description"],
                           "datasource": DATASOURCE, "gridPos": {"x": x, "y": y, "w": panel["w"], "h": panel["h"]},
                           "targets": [{"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend}
                                       for i, (expr, legend) in enumerate(panel["queries"])],
                           "fieldConfig": {"defaults": panel["defaults"], "overrides": []}, "options": panel["options"]})
            x, height = x + panel["w"], panel["h"]
        y += height
    return result


def dashboard(name):
    title, metric, rows = DASHBOARDS[name]
    return {"uid": f"moerl-{name}", "title": title, "tags": ["moerl"], "schemaVersion": 39, "version": 1, "editable": False, "graphTooltip": 1,
            "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "timezone": "browser",
            "links": [{"type": "dashboards", "tags": ["moerl"], "title": "moerl", "asDropdown": False, "includeVars": True, "keepTime": True}],
            "templating": {"list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}},
                variable("namespace", f"label_values({metric}, namespace)", ".*"),
                variable("job", f'label_values({metric}{{namespace=~"$namespace"}}, job)'),
                variable("pod", f'label_values(up{{namespace=~"$namespace", job=~"$job"}}, pod)', ".*")]},
            "annotations": {"list": []}, "panels": panels_of(rows)}


def render(name):
    return json.dumps(dashboard(name), indent=1) + "\n"


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for name in DASHBOARDS:
        (DIRECTORY / f"{name}.json").write_text(render(name))

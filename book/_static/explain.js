// The paste box: what kind of out-of-memory error a message reports. The functions are those of the library's explain.py,
// name by name; patterns and sentences come from its messages.toml, as MESSAGES in explain-messages.js.
const explainMessage = (() => {
  const M = MESSAGES;
  const pattern = (text, flags = "") => new RegExp(text.replaceAll("{size}", M.patterns.size), flags);
  const WIDTHS = [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  const UNITS = { b: 1, K: 2 ** 10, M: 2 ** 20, G: 2 ** 30 };
  const KIND_OF = {
    largest: "one tensor", full: "demand", limit: "smaller card", unified: "outside the allocator", unexplained: "cannot say",
  };
  const WEAKER = ["full", "largest"];
  const OTHERS = [...M.messages.others, ...M.messages.last];
  const BLANK = /[\t-\r\x1c- \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]+/g;
  const hundredths = (n) => `${Math.floor(n / 100)}.${String(n % 100).padStart(2, "0")}`;
  const fill = (text, words) => text.replace(/\{(\w+)\}/g, (_, name) => words[name]);
  const kindOf = (reason) => KIND_OF[reason] ?? reason;
  const unique = (values) => [...new Set(values)];

  class Size {
    constructor(least, most, text = "") { Object.assign(this, { least, most, text }); }
    static said(number, unit) {
      const width = UNITS[unit[0]];
      const [whole, decimals = ""] = number.split(".");
      if (width === 1) return new Size(Number(whole), Number(whole), `${number} ${unit}`);
      const twice = 2 * Number(whole + decimals) * width, scale = 2 * 10 ** decimals.length;
      const least = Math.max(0, Math.ceil((twice - width) / scale));
      return new Size(least, Math.floor((twice + width) / scale), `${number} ${unit}`);
    }
    static exactly(n) {
      const [width, unit] = WIDTHS.find(([width]) => n >= width) ?? [1, "bytes"];
      return new Size(n, n, width === 1 ? `${n} bytes` : `${hundredths(Math.floor((n * 200 + width) / (2 * width)))} ${unit}`);
    }
    plus(other) { return new Size(this.least + other.least, this.most + other.most); }
    minus(other) { return new Size(Math.max(0, this.least - other.most), Math.max(0, this.most - other.least)); }
    toString() {
      if (this.text) return this.text;
      const [width, unit] = WIDTHS.find(([width]) => this.most >= width) ?? [1, "bytes"];
      if (width === 1) return this.least < this.most ? `${this.least} to ${this.most} bytes` : `${this.most} bytes`;
      const least = hundredths(Math.floor(this.least * 100 / width)), most = hundredths(Math.ceil(this.most * 100 / width));
      return least === most ? `${most} ${unit}` : `${least} to ${most} ${unit}`;
    }
  }
  const NONE = new Size(0, 0, "0 bytes");

  const compact = (text) => text.replace(pattern(M.patterns.escapes, "g"), "").replace(/\r/g, "\n")
    .replace(pattern(M.patterns.suffix, "gm"), "").replace(pattern(M.patterns.prefix, "gm"), "").replace(BLANK, "");

  function starts(plain) {
    const others = OTHERS.map(([, , text], number) => [String(number), text]);
    const first = M.messages.others.length;
    for (const forms of [[...Object.entries(M.starts), ...others.slice(0, first)], others.slice(first)]) {
      const found = forms.flatMap(([form, text]) => [...plain.matchAll(pattern(text, "g"))].map(({ index }) => [index, form]));
      if (found.length) return found.sort(([a, x], [b, y]) => a - b || (x < y ? -1 : 1));
    }
    return [];
  }

  function named(before) {
    const names = Object.fromEntries(M.gpus.map((gpu) => [gpu.name.replace(BLANK, ""), gpu]));
    const longestFirst = Object.keys(names).sort((a, b) => b.length - a.length).join("|");
    const found = unique(before.match(new RegExp(longestFirst, "g")) ?? []);
    return found.length === 1 ? names[found[0]] : null;
  }

  const steps = (kind, words) => M.next[kind].map((step) => fill(step, words));

  function ofALibrary(section, number, more) {
    const [kind, who, text] = OTHERS[number];
    const asked = section.match(pattern(text))[1];
    const device = kind === "host memory" ? "" : who.includes("HIP") ? "HIP" : "CUDA";
    const why = fill(M.why[device ? "library" : "host"], { who: who[0].toUpperCase() + who.slice(1) });
    const words = { smi: M.smi[device] ?? "", gpu: " --gpu NAME", pids: "", settings: "PYTORCH_CUDA_ALLOC_CONF" };
    const rows = asked ? [[M.labels.tried, String(Size.exactly(Number(asked)))]] : [];
    return { kind, possible: [], device, index: null, rows, why: [why], next: steps(kind, words), more };
  }

  // What the message says, and whose the rest is.
  function read(section, before, form) {
    let sizes = {};
    for (const [name, text] of Object.entries(M.fields)) {
      const match = section.match(pattern(text));
      if (match) sizes[name] = Size.said(...match.slice(1).filter(Boolean));
    }
    sizes = Object.fromEntries(Object.entries(sizes).filter(([, size]) => size.most < M.unknown));
    if (form === "unified" && sizes.total && sizes.allocated && sizes.other) {
      sizes.this = sizes.allocated.plus(sizes.other);
      sizes.unallocated = NONE;
      sizes.free = sizes.total.minus(sizes.this);
      delete sizes.other;
    }
    if (sizes.allocated && sizes.reserved) {
      sizes.unallocated = sizes.reserved.minus(sizes.allocated);
      delete sizes.reserved;
    }
    const device = form === "unified" ? "MPS" : Object.keys(M.smi).find((name) => before.endsWith(name)) ?? "CUDA";
    const index = [...section.matchAll(pattern(M.patterns.index, "g"))].flatMap((match) => match.slice(1)).find(Boolean);
    const processes = [...section.matchAll(pattern(M.patterns.process, "g"))]
      .map(([, pid, ...size]) => [pid, Size.said(...size)]);
    return {
      form, device, sizes, processes, settings: section.match(pattern(M.patterns.settings))?.[0] ?? "PYTORCH_CUDA_ALLOC_CONF",
      index: index === undefined ? null : /^\d+$/.test(index) ? Number(index) : index.charCodeAt(0),
    };
  }

  function stateOf({ sizes, processes }) {
    const { total } = sizes;
    const free = sizes.free ?? new Size(0, total.most), used = total.minus(free);
    const allocated = sizes.allocated ?? new Size(0, used.most);
    const unallocated = sizes.unallocated ?? new Size(0, used.minus(sizes.allocated ?? NONE).most);
    const reserved = allocated.plus(unallocated);
    const known = processes.map(([, size]) => size).filter((size) => size.most < M.unknown);
    const able = known.filter((size) => size.most >= reserved.least);
    let own = null;
    if (sizes.this) own = sizes.this.most >= reserved.least ? sizes.this : null;
    else if (able.length === 1 && sizes.allocated && able[0].most <= reserved.least + M.context[1]) [own] = able;
    const most = known.length ? Math.max(...known.map((size) => size.most)) : used.most;
    const state = { tried: sizes.tried, total, free, allocated, unallocated, private: sizes.private ?? NONE };
    state.own = own ?? new Size(reserved.least, Math.max(reserved.least, most));
    if (sizes.allowed) state.allowed = sizes.allowed;
    const derived = !(sizes.free && sizes.allocated && sizes.unallocated) ? {}
      : own ? { outside: own.minus(reserved), others: used.minus(own) } : { unknown: used.minus(reserved) };
    return { state, own, derived };
  }

  function reason(x, form, thought) {
    const { tried, total, free } = x;
    const reserved = x.allocated + x.unallocated, context = form === "unified" ? [0, 0] : M.context;
    const own = Math.max(x.own, reserved), whole = Math.max(total, thought?.total ?? 0);
    if (tried > whole - context[0]) return ["one tensor"];
    const counted = form === "async" ? x.allocated : reserved;
    const limited = x.allowed !== undefined && free >= tried && counted + tried > x.allowed;
    let left = limited ? Math.max(0, x.allowed - counted) : free;
    if (!limited && free >= tried) {
      if (free * M.share >= total) return ["unexplained"];
      left = 0;
    }
    const holders = { fragmentation: x.unallocated, "private pools": x.private };
    if (limited) holders.limit = free - left;
    else Object.assign(holders, {
      "another process": total - free - own,
      [form === "unified" ? "unified" : "outside the allocator"]: own - reserved - context[1],
      "smaller card": whole - total,
    });
    const could = Object.values(holders).reduce((sum, nbytes) => sum + Math.max(0, nbytes), left);
    const causes = [];
    for (const name of Object.keys(holders).sort((a, b) => holders[b] - holders[a])) {
      if (left < tried && holders[name] * M.share >= total) {
        left += holders[name];
        causes.push(name);
      }
    }
    if (left >= tried) return causes;
    if (Math.max(could, free + x.unallocated) >= tried) return ["full"];
    return tried > x.allocated - x.private ? ["largest"] : ["demand"];
  }

  function corners({ own, ...state }, form, thought) {
    const refused = state.free.least < state.tried.most, found = new Map();
    let places = [{}];
    for (const [name, { least, most }] of Object.entries(state)) {
      places = places.flatMap((x) => unique([least, most]).map((nbytes) => ({ ...x, [name]: nbytes })));
    }
    for (const x of places) {
      const beyond = x.allocated + x.unallocated + M.context[1], used = x.total - x.free, lacking = x.tried - x.free;
      const borders = [0, Math.floor(x.total / M.share), x.unallocated, x.private, lacking, lacking - x.unallocated,
        lacking - x.private];
      const within = [...borders.flatMap((border) => [beyond + border, used - border, used - border + 1]),
        Math.floor((used + beyond) / 2)].filter((place) => own.least < place && place < own.most);
      for (const place of unique([own.least, own.most, ...within])) {
        let causes = reason({ ...x, own: place }, form, thought);
        if (causes[0] === "unexplained" && refused) causes = reason({ ...x, own: place, free: x.tried - 1 }, form, thought);
        found.set(causes.join("+"), causes);
      }
    }
    return [...found.values()];
  }

  function near(total) {
    const exact = M.gpus.filter((gpu) => total.least <= gpu.total + gpu.precision && gpu.total <= total.most);
    return exact.length ? exact : M.gpus.filter((gpu) => Math.abs(gpu.total - total.most) * 100 <= 3 * gpu.total);
  }

  function missing(sizes) {
    const names = Object.entries(M.missing).filter(([name]) => !(name in sizes)).map(([, text]) => text);
    return names.length ? fill(M.why.missing, { missing: names.join(", ") }) : "";
  }

  function whyOf({ form, sizes }, state, chosen, possible, thought, shown) {
    const limited = chosen[0] === "limit";
    const counted = form === "async" ? state.allocated : state.allocated.plus(state.unallocated);
    const room = state.allowed ? state.allowed.minus(counted) : NONE;
    const words = {
      ...state, ...shown,
      left: limited ? `${room} left of its limit` : `${state.free} free`,
      room, sum: state.free.plus(state.unallocated), live: shown.live ?? state.allocated,
      others: state.total.minus(state.free).minus(state.own),
      outside: state.own.minus(state.allocated).minus(state.unallocated),
      context: Size.exactly(M.context[1]),
      name: thought?.name ?? "", wanted: thought ? Size.exactly(thought.total) : "",
      possible: possible.join(" or "), more: chosen.slice(1).map(kindOf).join(" and "),
    };
    const open = ["open", "unexplained"].includes(chosen[0]);
    return [
      M.why[chosen[0]],
      chosen.length > 1 && M.why.together,
      open && shown.unknown && M.why.whose,
      open && missing(sizes),
      state.allocated.least > state.total.most && M.why.lent,
      form === "caching" && ["2.00 MiB", "20.00 MiB"].includes(String(words.tried)) && M.why.segment,
    ].filter(Boolean).map((text) => fill(text, words));
  }

  function ofAnAllocator(message, wanted, more) {
    const sizes = { ...message.sizes }, decided = sizes.tried && sizes.total;
    let state, own = null, derived, thought = wanted, reasons = [["unexplained"]];
    if (decided) {
      ({ state, own, derived } = stateOf(message));
      Object.assign(sizes, derived);
      if (thought && (thought.total - state.total.most) * M.share < state.total.most) thought = null;
      reasons = corners(state, message.form, thought);
    }
    let kinds = unique(reasons.map(([first]) => kindOf(first)));
    if (kinds.length > 1) kinds = kinds.filter((kind) => kind !== "cannot say");
    const kind = kinds.length === 1 ? kinds[0] : "cannot say";
    const possible = kind === "cannot say" ? Object.keys(M.kinds).filter((name) => name !== kind && kinds.includes(name)) : [];
    const weak = (causes) => [WEAKER.includes(causes[0]) ? 1 : 0, causes.length];
    const fitting = reasons.filter(([first]) => kindOf(first) === kind).sort((a, b) => {
      const [x, y] = [weak(a), weak(b)];
      return y[0] - x[0] || y[1] - x[1] || (a.join("\0") < b.join("\0") ? 1 : -1);
    });
    const chosen = fitting[0] ?? ["open"];
    const like = sizes.total && message.device === "CUDA" ? near(sizes.total) : [];
    const same = (a, b) => b && a.least === b.least && a.most === b.most;
    const pids = message.processes.filter(([, size]) => !same(size, own)).map(([pid]) => pid).slice(0, 8);
    const words = {
      smi: M.smi[message.device], settings: message.settings, gpu: ` --gpu ${like.length === 1 ? like[0].key : "NAME"}`,
      pids: pids.length ? `: process ${pids.join(", ")}` : "",
    };
    const shown = { ...sizes };
    if (sizes.allocated) shown.live = sizes.private ? sizes.allocated.minus(sizes.private) : sizes.allocated;
    const also = like.length ? ` (${like.map((gpu) => gpu.key).join(", ")})` : "";
    const rows = Object.entries(M.labels).filter(([name]) => shown[name])
      .map(([name, label]) => [label, `${shown[name]}${name === "total" ? also : ""}`]);
    return {
      kind, possible, device: message.device, index: message.index, rows,
      why: decided ? whyOf(message, state, chosen, possible, thought, shown) : [missing(sizes)],
      next: [...steps(message.form === "async" && kind === "cannot say" ? "async" : kind, words), ...(chosen[0] === "full" ? steps("full", words) : [])], more,
    };
  }

  return (text, key) => {
    const plain = compact(text), found = starts(plain);
    if (!found.length) return null;
    const [[at, form]] = found, more = found.length - 1;
    const section = plain.slice(at, Math.min(more ? found[1][0] : plain.length, at + M.longest));
    const before = plain.slice(Math.max(0, at - 100_000), at);
    if (!(form in M.starts)) return ofALibrary(section, Number(form), more);
    const thought = M.gpus.find((gpu) => gpu.key === key) ?? named(before);
    return ofAnAllocator(read(section, before, form), thought, more);
  };
})();

// The page: a box, and the answer below it. What is pasted is only ever text, and goes nowhere.
(() => {
  const home = document.getElementById("explain");
  if (!home) return;
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const box = make("textarea", {
    id: "explain-text", rows: 8, spellcheck: "false", autocomplete: "off", placeholder: "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate …",
  });
  const gpus = MESSAGES.gpus.map(({ key, name }) => new Option(name.replace("NVIDIA ", ""), key));
  const gpu = make("select", { id: "explain-gpu" }, new Option("the one that the log names, if it does", ""), ...gpus);
  const answer = make("div", { "aria-live": "polite", class: "explain-answer" });
  const list = (lines) => make("ul", {}, ...lines.map((line) => {
    const [command, remark] = line.split("  # ");
    return make("li", {}, ...(remark || /^(?:everybyte|free|nvidia-smi|PYTORCH)\b/.test(line)
      ? [make("code", {}, command), remark ? `: ${remark}` : ""] : [line]));
  }));
  const show = () => {
    if (!box.value.trim()) return answer.replaceChildren();
    const found = explainMessage(box.value, gpu.value);
    if (!found) {
      return answer.replaceChildren(make("p", { class: "calculator-verdict calculator-tight" },
        "Not an out-of-memory message I know: paste all of it, with its figures."));
    }
    const { kind, possible, rows, why, next, more } = found;
    const state = kind === "cannot say" ? "tight" : "none";
    const verdict = `${kind}${possible.length ? `: ${possible.join(" or ")}` : `: ${MESSAGES.kinds[kind]}`}`;
    const table = make("table", { class: "table" }, make("caption", {}, "What the message says"), make("tbody", {},
      ...rows.map(([label, size]) => make("tr", {}, make("th", { scope: "row" }, label), make("td", {}, size)))));
    const parts = [make("p", { class: `calculator-verdict calculator-${state}` }, verdict), ...why.map((line) => make("p", {}, line))];
    if (rows.length) parts.push(table);
    parts.push(make("p", { class: "explain-next" }, "Next"), list(next));
    if (more) parts.push(make("p", {}, `${more} more in what was pasted; the first decides, because those after it may be its consequences.`));
    answer.replaceChildren(...parts);
  };
  box.addEventListener("input", show);
  gpu.addEventListener("change", show);
  home.replaceChildren(
    make("label", { for: "explain-text" }, "The message, or the log that it stands in"), box,
    make("label", { for: "explain-gpu" }, "The GPU that you thought you had"), gpu, answer,
  );
})();

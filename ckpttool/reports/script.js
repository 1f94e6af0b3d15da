"use strict";
(() => {
const data = JSON.parse(document.getElementById("document").textContent);
const tensors = data.tensors, texts = tensors.texts, count = tensors.count;
const DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz-_";
const of = (column, i) => Array.isArray(column) ? column[i] : column;
const text = (column, i) => texts[of(tensors[column], i)];
const number = value => value === "Infinity" ? Infinity : value === "-Infinity" ? -Infinity : value;
const value = (name, i) => name in tensors.values ? number(of(tensors.values[name], i)) : null;
const names = tensors.name.map(([pieces, ...numbers]) =>
  tensors.names[pieces].reduce((name, piece, k) => name + (k ? numbers[k - 1] : "") + piece, ""));
const byName = new Map(names.map((name, i) => [name, i]));
tensors.values.bytes = tensors.bytes;
const STATISTICS = Object.keys(tensors.values), FIRST = data.listed.find(name => STATISTICS.includes(name)) || "bytes";

// Elements. Text is always set as text.
function element(tag, settings = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, setting] of Object.entries(settings))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), setting);
    else if (name === "style") made.style.cssText = setting;
    else if (setting !== null && setting !== false) made.setAttribute(name, setting);
  made.append(...children);
  return made;
}
function drawing(tag, settings = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, setting] of Object.entries(settings))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), setting);
    else made.setAttribute(name, setting);
  made.append(...children);
  return made;
}
const told = (title, shape) => { shape.append(drawing("title", {}, title)); return shape; };
function shown(figure) {
  if (figure === null || figure === undefined) return "–";
  if (!Number.isFinite(figure)) return String(figure);
  if (Number.isInteger(figure) && Math.abs(figure) < 1e15) return figure.toLocaleString("en");
  return Math.abs(figure) >= 1e-3 && Math.abs(figure) < 1e5 ? String(Number(figure.toPrecision(4))) : figure.toExponential(3);
}
function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let k = 0;
  while (bytes >= 1000 && k < units.length - 1) { bytes /= 1000; k++; }
  return `${k ? Number(bytes.toPrecision(3)) : bytes} ${units[k]}`;
}
// A sentence with the names that stand in backticks as code.
// A name that may be broken after a dot or an underscore.
const named = name => element("code", {}, ...name.split(/(?<=[._])/).flatMap(piece => [piece, element("wbr")]));
const prose = words => words.split("`").length % 2 ? words.split("`").map((piece, k) => k % 2 ? element("code", {}, piece) : piece) : [words];
const collator = new Intl.Collator("en", {numeric: true});
const choice = (label, options, chosen, change) => {
  const select = element("select", {onchange: () => change(select.value)},
    ...options.map(([name, title]) => element("option", {value: name, ...(name === chosen ? {selected: ""} : {})}, title)));
  return element("label", {}, label + " ", select);
};

// Colours.
const RAMP = [[68, 1, 84], [65, 68, 135], [42, 120, 142], [34, 168, 132], [122, 209, 81], [253, 231, 37]];
const AWAY = [[33, 102, 172], [146, 197, 222], [240, 240, 240], [244, 165, 130], [178, 24, 43]];
function colour(ramp, share) {
  const at = Math.min(Math.max(share, 0), 1) * (ramp.length - 1), k = Math.min(Math.floor(at), ramp.length - 2);
  return `rgb(${ramp[k].map((one, c) => Math.round(one + (ramp[k + 1][c] - one) * (at - k))).join(",")})`;
}
const rampOf = ramp => `linear-gradient(90deg, ${ramp.map(one => `rgb(${one.join(",")})`).join(",")})`;
const rankColour = rank => rank === null || rank === undefined ? "#8b8d98"
  : `oklch(${.56 + rank % 3 * .05} .115 ${Math.round(rank * 137.508 + 250) % 360})`;
const kindColour = name => { let h = 7; for (const sign of name) h = (h * 31 + sign.codePointAt(0)) % 3600; return `oklch(.52 .09 ${h / 10})`; };
function scale(values) {
  const all = values.filter(one => one !== null && Number.isFinite(one)).sort((a, b) => a - b);
  if (!all.length) return {share: () => 0, low: null, high: null, name: ""};
  const high = all[all.length - 1], least = all.find(one => one > 0), low = all[0];
  if (low >= 0 && high / least > 30) {
    // Zeros, as of tensors that are equal, have the first colour.
    const span = Math.log(high / least), from = low > 0 ? 0 : .1;
    return {share: one => one > 0 ? from + (1 - from) * Math.log(one / least) / span : 0, low, high,
      name: low > 0 ? "logarithmic" : `zero, then logarithmic from ${shown(least)}`};
  }
  return {share: one => high > low ? (one - low) / (high - low) : .5, low, high, name: ""};
}
const legend = (ramp, low, high, note) => element("div", {class: "legend"}, element("span", {}, low),
  element("span", {class: "ramp", style: `background:${rampOf(ramp)}`}), element("span", {}, high), element("span", {}, note));

// A table of coloured cells; arrow keys move, Enter opens.
function matrix(rowNames, columnNames, cell, open, say) {
  const table = element("table", {class: rowNames.length > 50 ? "matrix many" : "matrix", role: "grid"});
  table.append(element("thead", {}, element("tr", {}, element("th"),
    ...columnNames.map(name => element("th", {scope: "col", title: name}, element("span", {}, name))))));
  const body = element("tbody");
  const cells = rowNames.map((name, r) => {
    const row = element("tr", {}, element("th", {scope: "row"}, name)), made = [];
    columnNames.forEach((_, c) => {
      const at = cell(r, c), td = element("td", {tabindex: -1, role: "gridcell"});
      if (at) {
        td.style.background = at.colour; td.title = at.title; td.setAttribute("aria-label", at.title);
        if (at.planted) td.classList.add("planted");
      } else { td.className = "absent"; td.style.background = "var(--hatch)"; }
      td.dataset.row = r; td.dataset.column = c;
      row.append(td); made.push(td);
    });
    body.append(row);
    return made;
  });
  table.append(body);
  const go = (r, c) => { const to = cells[r] && cells[r][c]; if (to) to.focus(); };
  const place = event => { const td = event.target.closest("td"); return td && [Number(td.dataset.row), Number(td.dataset.column)]; };
  table.addEventListener("click", event => { const at = place(event); if (at && cell(...at)) open(...at); });
  table.addEventListener("focusin", event => {
    const at = place(event);
    if (!at) return;
    table.querySelectorAll('td[tabindex="0"]').forEach(td => td.setAttribute("tabindex", -1));
    event.target.setAttribute("tabindex", 0);
    say(event.target.title);
  });
  table.addEventListener("mouseover", event => { const td = event.target.closest("td"); if (td) say(td.title); });
  table.addEventListener("keydown", event => {
    const at = place(event), move = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (!at) return;
    if (move) { go(at[0] + move[0], at[1] + move[1]); event.preventDefault(); event.stopPropagation(); }
    if (event.key === "Enter" && cell(...at)) open(...at);
  });
  if (cells.length && cells[0].length) cells[0][0].setAttribute("tabindex", 0);
  return table;
}

// Planes: the model, and each moment of an optimizer.
const planes = new Map();
for (let i = 0; i < count; i++) {
  const part = text("part", i), moment = text("moment", i), key = moment ? `${part}: ${moment}` : part;
  if (!planes.has(key)) planes.set(key, []);
  planes.get(key).push(i);
}
const planeNames = [...planes.keys()].filter(key => planes.get(key).some(i => value("numel", i) > 1));
const planted = new Set(Object.keys(data.messages));
const isPlanted = list => list.some(i => planted.has(names[i]));
// Of several tensors in a cell, such as experts, the largest counts; of zeros and NaN, all.
function together(name, list) {
  const values = list.map(i => value(name, i)).filter(one => one !== null && one !== undefined);
  if (!values.length) return null;
  if (["zeros", "nan", "inf", "numel", "subnormals", "bytes", "differing elements"].includes(name)) return values.reduce((a, b) => a + b, 0);
  return values.reduce((a, b) => name === "min" ? Math.min(a, b) : Math.max(a, b));
}
const median = values => { const all = values.filter(Number.isFinite).sort((a, b) => a - b); return all[all.length >> 1]; };
function shortened(kinds) {
  const first = kinds[0] || "", at = first.indexOf("*.") + 2;
  return at > 1 && kinds.every(kind => kind.startsWith(first.slice(0, at))) ? kinds.map(kind => kind.slice(at)) : kinds;
}
function grid(list, rowOf, columnOf) {
  const rows = [...new Set(list.map(rowOf))].sort(collator.compare), columns = [...new Set(list.map(columnOf))];
  const cells = new Map();
  for (const i of list) {
    const key = rowOf(i) + "\u0000" + columnOf(i);
    if (!cells.has(key)) cells.set(key, []);
    cells.get(key).push(i);
  }
  return {rows, columns, at: (r, c) => cells.get(rows[r] + "\u0000" + columns[c])};
}
function painted(one, state, say, open) {
  const all = [];
  const medians = one.columns.map((_, c) => median(one.rows.map((_, r) => { const list = one.at(r, c); return list ? together(state.statistic, list) : NaN; })));
  one.rows.forEach((_, r) => one.columns.forEach((_, c) => { const list = one.at(r, c); if (list) all.push(together(state.statistic, list)); }));
  const to = scale(all), relative = state.relative;
  const cell = (r, c) => {
    const list = one.at(r, c);
    if (!list) return null;
    const figure = together(state.statistic, list);
    const share = relative ? .5 + Math.log2(figure / medians[c]) / 10 : to.share(figure);
    const title = `${list.length > 1 ? `${one.columns[c]}, ${one.rows[r]} (${list.length} tensors)` : names[list[0]]}: ${state.statistic} ${shown(figure)}`
      + (relative && medians[c] ? `, ${shown(figure / medians[c])} times the median` : "");
    return {title, planted: isPlanted(list), colour: figure === null || Number.isNaN(share) ? "var(--hatch)" : colour(relative ? AWAY : RAMP, share)};
  };
  const key = relative ? legend(AWAY, "1/32", "32", "relative to the median across layers") : legend(RAMP, shown(to.low), shown(to.high), to.name);
  return [key, element("div", {class: "scroll"}, matrix(one.rows, shortened(one.columns), cell, (r, c) => open(one.at(r, c)), say))];
}
function opened(list) {
  if (list.length === 1) location.hash = "tensor/" + encodeURIComponent(names[list[0]]);
  else { search.query = list.length ? `${text("layer", list[0])}.` : ""; search.only = list; location.hash = "tensor"; show(); }
}
const statisticOptions = STATISTICS.map(name => [name, name.replace(/^p(\d+)_?(\d*)$/, (_, a, b) => `quantile ${a}${b ? "." + b : ""} %`).replaceAll("_", " ")]);

const draw = {};
draw.matrix = section => {
  const state = {plane: planeNames[0], statistic: FIRST, relative: false};
  const area = element("div"), line = element("p", {class: "told mono soft", "aria-live": "polite"}, "Each cell is a tensor.");
  const say = words => { line.textContent = words; };
  const paint = () => {
    const list = planes.get(state.plane) || [], within = list.filter(i => text("layer", i)), outside = list.filter(i => !text("layer", i));
    area.replaceChildren();
    if (within.length) area.append(...painted(grid(within, i => text("layer", i), i => text("kind", i)), state, say, opened));
    if (outside.length) area.append(element("h3", {}, "other tensors"),
      ...painted(grid(outside, i => names[i], () => state.statistic), state, say, opened));
  };
  const relative = element("input", {type: "checkbox", onchange: event => { state.relative = event.target.checked; paint(); }});
  section.append(element("div", {class: "controls"},
    choice("of", planeNames.map(name => [name, name]), state.plane, name => { state.plane = name; paint(); }),
    choice("colour:", statisticOptions, state.statistic, name => { state.statistic = name; paint(); }),
    element("label", {}, relative, " relative to the median across layers")), line, area);
  paint();
};
draw.experts = section => {
  const all = [...Array(count).keys()].filter(i => text("expert", i) !== "" && value("numel", i) > 1);
  const kinds = [...new Set(all.map(i => text("kind", i) + (text("moment", i) ? ": " + text("moment", i) : "")))];
  const kindOf = i => text("kind", i) + (text("moment", i) ? ": " + text("moment", i) : "");
  const state = {kind: kinds[0], statistic: FIRST, relative: false};
  const area = element("div"), line = element("p", {class: "told mono soft", "aria-live": "polite"}, "A row is a layer, a column an expert.");
  const paint = () => area.replaceChildren(...painted(grid(all.filter(i => kindOf(i) === state.kind).sort((a, b) => collator.compare(text("expert", a), text("expert", b))),
    i => text("layer", i), i => text("expert", i)), state, words => { line.textContent = words; }, opened));
  const relative = element("input", {type: "checkbox", onchange: event => { state.relative = event.target.checked; paint(); }});
  section.append(element("div", {class: "controls"},
    choice("of", kinds.map(name => [name, name]), state.kind, name => { state.kind = name; paint(); }),
    choice("colour:", statisticOptions, state.statistic, name => { state.statistic = name; paint(); }),
    element("label", {}, relative, " relative to the median across layers")), line, area);
  paint();
};

// A linear histogram of the elements between two quantiles.
function linear([low, high, most, shares, below, above]) {
  low = number(low); high = number(high);
  const n = shares.length, width = 640, height = 180, bar = width / n, step = (high - low) / n;
  const svg = drawing("svg", {viewBox: `0 0 ${width} ${height + 23}`, role: "img", "aria-label": "histogram"});
  for (let k = 0; k < n; k++) {
    const share = DIGITS.indexOf(shares[k]) / (DIGITS.length - 1), from = low + k * step;
    const title = n > 1 ? `${shown(from)} to ${shown(from + step)}: about ${shown(Math.round(share * most))}` : `${shown(low)}: ${shown(most)}`;
    if (share) svg.append(told(title, drawing("rect", {class: from + step / 2 < 0 ? "negative" : "positive", x: k * bar, y: height - height * share, width: Math.max(bar - 1, .5), height: height * share})));
  }
  svg.append(drawing("line", {class: "axis", x1: 0, x2: width, y1: height, y2: height}));
  const label = (x, words, anchor) => svg.append(drawing("text", {x, y: height + 17, "text-anchor": anchor}, words));
  label(0, shown(low), "start");
  if (n > 1) label(width, shown(high), "end");
  const zero = -low / (high - low);
  if (zero > .08 && zero < .92) label(zero * width, "0", "middle");
  const apart = [below ? `${shown(below)} elements are smaller` : "", above ? `${shown(above)} are larger` : ""].filter(Boolean).join(", ");
  return [svg, `linear, between the quantiles 0.1 % and 99.9 %${apart ? "; " + apart : ""}`];
}
// The magnitude spectrum: magnitudes grow to both sides of zero, in half-octaves; the height is the logarithm of the count.
function spectrum([first, negative, positive], zeros) {
  const level = (digits, k) => DIGITS.indexOf(digits[2 * k]) * 64 + DIGITS.indexOf(digits[2 * k + 1]);
  const n = Math.max(negative.length, positive.length) / 2;
  if (!n && !zeros) return ["", "no finite elements"];
  const edge = k => { const b = first + k; return 2 ** ((b >> 1) - 1) * (1 + (b & 1) / 2); };
  const hasNegative = /[^0]/.test(negative), bars = (hasNegative ? n : 0) + 1 + n, width = 640, height = 180, bar = width / bars;
  const zeroLevel = zeros ? 1 + Math.log2(zeros) * 64 : 0;
  let top = zeroLevel;
  for (let k = 0; k < n; k++) top = Math.max(top, level(negative, k), level(positive, k));
  const svg = drawing("svg", {viewBox: `0 0 ${width} ${height + 23}`, role: "img", "aria-label": "magnitude spectrum"});
  const add = (at, high, kind, title) => {
    if (high) svg.append(told(title, drawing("rect", {class: kind, x: at * bar, y: height - height * high / top, width: Math.max(bar - 1, .5), height: height * high / top})));
  };
  const many = high => shown(Math.round(2 ** ((high - 1) / 64)));
  for (let k = 0; k < n; k++) {
    if (hasNegative) add(n - 1 - k, level(negative, k), "negative", `-${shown(edge(k + 1))} to -${shown(edge(k))}: about ${many(level(negative, k))}`);
    add((hasNegative ? n : 0) + 1 + k, level(positive, k), "positive", `${shown(edge(k))} to ${shown(edge(k + 1))}: about ${many(level(positive, k))}`);
  }
  add(hasNegative ? n : 0, zeroLevel, "empty", `zero: ${shown(zeros)}`);
  svg.append(drawing("line", {class: "axis", x1: 0, x2: width, y1: height, y2: height}));
  const label = (at, words, anchor) => svg.append(drawing("text", {x: at, y: height + 17, "text-anchor": anchor}, words));
  if (hasNegative) label(0, "-" + shown(edge(n)), "start");
  label(((hasNegative ? n : 0) + .5) * bar, "0", bars > 3 ? "middle" : "start");
  label(width, shown(edge(n)), "end");
  return [svg, "magnitudes in half-octaves, away from zero on both sides; heights are logarithms of the counts"];
}
let view = "histogram";
function distribution(i) {
  const figure = element("figure"), views = [["histogram", "histogram"], ["spectrum", "magnitude spectrum"]].filter(([name]) => name !== "histogram" || i in tensors.central);
  const paint = () => {
    const [svg, note] = view === "histogram" && i in tensors.central ? linear(tensors.central[i]) : spectrum(tensors.histograms[i], value("zeros", i));
    figure.replaceChildren(svg, element("p", {class: "soft"}, note));
  };
  paint();
  const select = choice("", views, view, name => { view = name; paint(); });
  select.firstElementChild.setAttribute("aria-label", "view of the values");
  return element("div", {class: "plot"}, element("h3", {}, "Values"), element("div", {class: "controls"}, select), figure);
}

// A thumbnail: blocks of rows and columns, coloured by the logarithm of the largest magnitude.
function thumbnail([rows, columns, low, high, letters], shape) {
  const bytes = Uint8Array.from(atob(letters), sign => sign.charCodeAt(0));
  const canvas = element("canvas", {width: columns, height: rows, class: "thumbnail", role: "img", "aria-label": "thumbnail"});
  const context = canvas.getContext("2d"), n = shape.slice(0, -1).reduce((a, b) => a * b, 1), m = shape[shape.length - 1];
  bytes.forEach((level, k) => {
    context.fillStyle = level === 255 ? "#e5484d" : level ? colour(RAMP, (level - 1) / 253) : "#8b8d98";
    context.fillRect(k % columns, Math.floor(k / columns), 1, 1);
  });
  const line = element("p", {class: "told mono soft", "aria-live": "polite"}, "Each block has the colour of its largest magnitude.");
  const span = (i, of, all) => { const from = Math.floor(i * all / of), to = Math.floor((i + 1) * all / of) - 1; return from === to ? from : `${from} to ${to}`; };
  canvas.addEventListener("mousemove", event => {
    const c = Math.min(Math.floor(event.offsetX * columns / canvas.clientWidth), columns - 1), r = Math.min(Math.floor(event.offsetY * rows / canvas.clientHeight), rows - 1);
    const level = bytes[Math.max(r, 0) * columns + Math.max(c, 0)];
    const most = level === 255 ? "has NaN or infinities" : "at most " + shown(level ? Number((low * (high / low) ** ((level - 1) / 253)).toPrecision(3)) : 0);
    line.textContent = `rows ${span(Math.max(r, 0), rows, n)}, columns ${span(Math.max(c, 0), columns, m)}: ${most}`;
  });
  const zeros = bytes.includes(0) ? [element("span", {}, element("i", {style: "background:#8b8d98"}), "zero")] : [];
  const others = bytes.includes(255) ? [element("span", {}, element("i", {style: "background:#e5484d"}), "NaN or infinities")] : [];
  const key = legend(RAMP, shown(low), shown(high), low !== null && high > low ? "logarithmic" : "");
  key.append(...zeros, ...others);
  return [canvas, key, line];
}

// Shards. A layout is where the tensors lie in the files; of a reshard there are two, before and after.
function numbers(words) {
  return words === "" ? [] : words.split(",").flatMap(word => {
    const [first, last = first] = word.split("-").map(Number);
    return Array.from({length: last - first + 1}, (_, k) => first + k);
  });
}
const layoutOf = ({files, shards}) => ({files, ...shards, owners: shards.owners.map(numbers)});
const layout = layoutOf(data.layout), {tilings, owners, files} = layout;
const rankOf = (file, at = layout) => at.files[file] ? at.files[file][2] : null;
// A tensor as a rectangle: its first dimension down, all others across. What no box covers stays hatched.
function map(at, [tiling, ownerNumber, placement]) {
  const [shape, boxes] = at.tilings[tiling], owner = at.owners[ownerNumber], holders = at.holders[`${tiling},${placement}`];
  const dims = shape.length > 1 ? 2 : 1, rows = dims > 1 ? shape[0] : 1;
  const columns = dims > 1 ? shape.slice(1).reduce((a, b) => a * b, 1) : shape.length ? shape[0] : 1;
  const width = 260, height = Math.min(Math.max(dims > 1 ? width * rows / Math.max(columns, 1) : 40, 48), 208);
  const svg = drawing("svg", {viewBox: `-1 -1 ${width + 2} ${height + 2}`, role: "img", "aria-label": "sharding map"});
  svg.append(drawing("rect", {class: "empty", x: 0, y: 0, width, height}));
  boxes.forEach(([offsets, sizes], k) => {
    if (sizes.includes(0)) return;
    const rank = owner.length ? rankOf(owner[k], at) : null;
    let x = 0, w = width, y = 0, h = height;
    if (dims > 1) {
      y = height * offsets[0] / rows; h = height * sizes[0] / rows;
      const cut = sizes.findIndex((one, d) => d && one < shape[d]);
      if (cut > 0) { x = width * offsets[cut] / shape[cut]; w = width * sizes[cut] / shape[cut]; }
    } else if (shape.length) { x = width * offsets[0] / columns; w = width * sizes[0] / columns; }
    const also = holders && holders[k] && holders[k].length > 1 ? `; held by ranks ${holders[k].join(", ")}` : "";
    const title = `[${offsets.map((from, d) => `${from}:${from + sizes[d]}`).join(", ")}]`
      + (owner.length && at.files[owner[k]] ? ` in ${at.files[owner[k]][0]}` : "") + (rank === null ? "" : `, rank ${rank}`) + also;
    svg.append(told(title, drawing("rect", {x, y, width: w, height: h, fill: rankColour(rank), stroke: "var(--page)", "stroke-width": 1})));
    if (rank !== null && w > 22 && h > 14)
      svg.append(drawing("text", {class: "on", x: x + w / 2, y: y + h / 2 + 4, "text-anchor": "middle"}, holders && holders[k] ? holders[k].slice(0, 4).join(" ") : rank));
  });
  return svg;
}
function about(at, [tiling, , placement, chunks]) {
  const [shape, boxes] = at.tilings[tiling], whole = shape.reduce((a, b) => a * b, 1);
  const rest = whole - boxes.reduce((sum, [, sizes]) => sum + sizes.reduce((a, b) => a * b, 1), 0), none = boxes.filter(([, sizes]) => sizes.includes(0)).length;
  return [`[${shape.join(", ")}]`, `${chunks} ${chunks === 1 ? "box" : "boxes"}`, at.placements[placement],
    none ? `${none} empty: ranks without a row` : "", rest > 0 ? `${shown(rest)} elements in no box` : rest < 0 ? `${shown(-rest)} elements saved twice` : ""].filter(Boolean).join(" · ");
}
function drawLayout(section, at) {
  const groups = new Map();
  at.tensors.forEach((shard, i) => {
    if (!shard || shard[0] < 0) return;
    const key = shard.slice(0, 3).join();
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  });
  const ranks = [...new Set(at.files.map(file => file[2]).filter(rank => rank !== null))].sort((a, b) => a - b);
  if (ranks.length) section.append(element("div", {class: "legend"}, ...ranks.slice(0, 64).map(rank =>
    element("span", {}, element("i", {style: `background:${rankColour(rank)}`}), `rank ${rank}`)), ranks.length > 64 ? `and ${ranks.length - 64} more` : ""));
  section.append(element("p", {class: "soft"}, "A tensor is a rectangle, its first dimension down and the others across, cut into the boxes in which it is saved; what no box covers is grey."));
  const sorted = [...groups.values()].sort((a, b) => b.reduce((s, i) => s + of(tensors.bytes, i), 0) - a.reduce((s, i) => s + of(tensors.bytes, i), 0));
  const cards = element("div", {class: "cards"});
  for (const list of sorted.slice(0, 60)) {
    const shard = at.tensors[list[0]];
    const link = element("a", {href: "#tensor/" + encodeURIComponent(names[list[0]])}, named(names[list[0]]));
    cards.append(element("figure", {}, element("figcaption", {}, link, list.length > 1 ? ` and ${list.length - 1} more` : "",
      element("div", {class: "soft"}, about(at, shard))), map(at, shard)));
  }
  section.append(cards);
  if (sorted.length > 60) section.append(element("p", {class: "soft"}, `the 60 largest of ${sorted.length} ways to cut a tensor`));
}
draw.sharding = section => drawLayout(section, layout);
draw.after = section => drawLayout(section, layoutOf(data.after));

// Tensors.
const search = {query: "", only: null, limit: 200};
const LISTED = data.listed.filter(name => STATISTICS.includes(name)).concat(FIRST === "bytes" ? ["bytes"] : []);
draw.tensor = section => {
  const box = element("input", {type: "search", placeholder: "search names: qkv exp_avg", "aria-label": "search tensors", value: search.query});
  const list = element("div", {class: "scroll tall"}), note = element("p", {class: "soft"}), detail = element("div", {id: "detail"});
  const fill = () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    const from = search.only || [...names.keys()];
    const found = from.filter(i => words.every(word => names[i].toLowerCase().includes(word)));
    const head = element("thead", {}, element("tr", {}, ...["name", "dtype", "shape", ...LISTED].map((name, k) => element("th", {class: k > 2 ? "number" : ""}, name))));
    list.replaceChildren(element("table", {class: "wide"}, head, element("tbody", {}, ...found.slice(0, search.limit).map(i =>
      element("tr", {tabindex: 0, "data-tensor": i, "aria-selected": i === search.open}, element("td", {}, named(names[i])), element("td", {}, text("dtype", i)), element("td", {}, text("shape", i)),
        ...LISTED.map(name => element("td", {class: "number"}, name === "bytes" ? size(value(name, i)) : shown(value(name, i)))))))));
    note.textContent = found.length > search.limit ? `the first ${search.limit} of ${shown(found.length)} tensors` : `${shown(found.length)} of ${shown(count)} tensors`;
    if (data.omitted) note.textContent += `; ${shown(data.omitted)} small ones are not in this file`;
  };
  const open = event => { const row = event.target.closest("tr[data-tensor]"); if (row) location.hash = "tensor/" + encodeURIComponent(names[Number(row.dataset.tensor)]); };
  list.addEventListener("click", open);
  list.addEventListener("keydown", event => {
    const row = event.target.closest("tr[data-tensor]");
    if (!row) return;
    const next = {ArrowDown: row.nextElementSibling, ArrowUp: row.previousElementSibling}[event.key];
    if (next) { next.focus(); event.preventDefault(); }
    if (event.key === "Enter") open(event);
  });
  box.addEventListener("input", () => { search.only = null; fill(); });
  section.append(element("div", {class: "controls"}, box), note, list, detail);
  search.refresh = query => { box.value = query; fill(); };
  search.focus = () => box.focus();
  search.detail = i => {
    search.open = i;
    list.querySelectorAll("tr[aria-selected=true]").forEach(row => row.setAttribute("aria-selected", false));
    const row = list.querySelector(`tr[data-tensor="${i}"]`);
    if (row) row.setAttribute("aria-selected", true);
    detail.replaceChildren(...described(i));
  };
  fill();
  if (count) search.detail(search.open ?? [...names.keys()].reduce((a, b) => of(tensors.bytes, b) > of(tensors.bytes, a) ? b : a));
};
function described(i) {
  const figures = (pairs) => element("dl", {class: "figures"}, ...pairs.map(([name, figure]) => element("div", {}, element("dt", {}, name), element("dd", {}, figure))));
  const parts = [element("h2", {}, named(names[i])), element("p", {class: "soft"},
    [text("part", i), text("moment", i), text("dtype", i), `[${text("shape", i).replaceAll("×", ", ")}]`, size(of(tensors.bytes, i))].filter(Boolean).join(" · "))];
  const own = i in tensors.tied ? tensors.tied[i] : i;
  if (own !== i) parts.push(element("p", {}, "shares its bytes with ", element("a", {href: "#tensor/" + encodeURIComponent(names[own])}, element("code", {}, names[own]))));
  for (const message of data.messages[names[i]] || []) parts.push(element("ul", {class: "findings"}, element("li", {class: "grave"}, element("span", {}, ...prose(message)))));
  const made = tensors.histograms[i];
  const picture = tensors.thumbnails[own], pair = element("div", {class: "pair"});
  if (made) pair.append(distribution(i));
  if (picture) pair.append(element("div", {}, element("h3", {}, "Thumbnail"), ...thumbnail(picture, text("shape", i).split("×").map(Number))));
  parts.push(pair);
  parts.push(element("h3", {}, "Statistics"), figures(statisticOptions.map(([name, title]) => [title, shown(value(name, i))]).filter(([, figure]) => figure !== "–")));
  const channels = tensors.rows[i];
  if (channels) channels.forEach((one, k) => {
    if (!one) return;
    const [n, middle, most, at, outlying] = one, what = k ? "column" : "row";
    parts.push(element("h3", {}, k ? "Columns" : "Rows"), element("p", {}, `${shown(n)} ${what}s; the median of their largest magnitudes is ${shown(middle)}, `
      + `${what} ${at} has ${shown(most)}; ${outlying ? `${shown(outlying)} have` : "none has"} more than six times the median`));
  });
  const shard = layout.tensors[i];
  if (shard) {
    const [tiling, owner, , chunks] = shard, held = owners[owner];
    parts.push(element("h3", {}, "Where its bytes lie"));
    if (tiling >= 0) {
      parts.push(element("p", {class: "soft"}, about(layout, shard)), element("div", {class: "map"}, map(layout, shard)));
      const item = of(tensors.bytes, i) / Math.max(tilings[tiling][0].reduce((a, b) => a * b, 1), 1);
      parts.push(element("div", {class: "scroll"}, element("table", {}, element("thead", {}, element("tr", {}, ...["box", "file", "rank", "bytes"].map(name => element("th", {}, name)))),
        element("tbody", {}, ...tilings[tiling][1].slice(0, 64).map(([offsets, sizes], k) => { const file = files[held[k]]; return element("tr", {},
          element("td", {}, element("code", {}, `[${offsets.map((at, d) => `${at}:${at + sizes[d]}`).join(", ")}]`)), element("td", {}, element("code", {}, file ? file[0] : "")),
          element("td", {}, file && file[2] !== null ? String(file[2]) : ""), element("td", {class: "number"}, size(Math.round(sizes.reduce((a, b) => a * b, 1) * item)))); })))));
      if (chunks > 64) parts.push(element("p", {class: "soft"}, `the first 64 of ${chunks} boxes`));
    } else parts.push(element("p", {class: "soft"}, `${chunks} boxes; they are not in this file: \`ckpttool show\` lists them`));
  }
  return parts;
}

// Treemap.
function squares(items, x, y, width, height) {
  const placed = [], total = items.reduce((sum, item) => sum + item.bytes, 0);
  let rest = items.filter(item => item.bytes > 0), left = total;
  while (rest.length && width > 0 && height > 0) {
    const across = width >= height, side = across ? height : width, area = width * height;
    let row = [], sum = 0, worst = Infinity;
    for (const item of rest) {
      const next = sum + item.bytes, thick = area * next / left / side;
      const ratio = Math.max(...[...row, item].map(one => { const long = side * one.bytes / next; return Math.max(long / thick, thick / long); }));
      if (ratio > worst) break;
      row.push(item); sum = next; worst = ratio;
    }
    const thick = (across ? width : height) * sum / left;
    let at = across ? y : x;
    for (const item of row) {
      const long = side * item.bytes / sum;
      placed.push(across ? {item, x, y: at, width: thick, height: long} : {item, x: at, y, width: long, height: thick});
      at += long;
    }
    if (across) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    rest = rest.slice(row.length); left -= sum;
  }
  return placed;
}
const trees = {
  name: () => {
    const root = {name: "all", bytes: 0, below: new Map()};
    for (let i = 0; i < count; i++) {
      if (i in tensors.tied) continue;
      let node = root;
      node.bytes += of(tensors.bytes, i);
      for (const key of names[i].split(".")) {
        if (!node.below) node.below = new Map();
        if (!node.below.has(key)) node.below.set(key, {name: key, bytes: 0});
        node = node.below.get(key);
        node.bytes += of(tensors.bytes, i);
      }
      node.tensor = i;
    }
    return root;
  },
  file: () => heldBy(file => files[file][0], file => rankColour(rankOf(file))),
  rank: () => heldBy(file => rankOf(file) === null ? "no rank" : `rank ${rankOf(file)}`, file => rankColour(rankOf(file))),
};
function heldBy(nameOf, colourOf) {
  const root = {name: "all", bytes: 0, below: new Map()};
  layout.tensors.forEach((shard, i) => {
    if (!shard || shard[0] < 0 || i in tensors.tied) return;
    const [shape, boxes] = tilings[shard[0]], item = of(tensors.bytes, i) / Math.max(shape.reduce((a, b) => a * b, 1), 1);
    owners[shard[1]].forEach((file, k) => {
      if (!files[file]) return;
      const key = nameOf(file), bytes = boxes[k][1].reduce((a, b) => a * b, 1) * item;
      if (!root.below.has(key)) root.below.set(key, {name: key, bytes: 0, below: new Map(), fill: colourOf(file)});
      const node = root.below.get(key);
      if (!node.below.has(names[i])) node.below.set(names[i], {name: names[i], bytes: 0, tensor: i});
      node.below.get(names[i]).bytes += bytes; node.bytes += bytes; root.bytes += bytes;
    });
  });
  return root;
}
draw.bytes = section => {
  const state = {by: "name", path: []};
  const area = element("div"), trail = element("p", {class: "mono"}), line = element("p", {class: "told mono soft", "aria-live": "polite"}, "Enter or a click narrows, Backspace widens.");
  const made = {};
  const paint = focus => {
    const root = made[state.by] ||= trees[state.by]();
    const nodes = [root];
    for (const key of state.path) nodes.push(nodes[nodes.length - 1].below.get(key));
    let node = nodes[nodes.length - 1];
    trail.replaceChildren(...nodes.flatMap((one, k) => [k ? " › " : "", element("button", {onclick: () => { state.path = state.path.slice(0, k); paint(true); }}, `${one.name} ${size(Math.round(one.bytes))}`)]));
    const wide = area.clientWidth || 1000, width = Math.max(wide, 320), height = Math.round(Math.min(Math.max(width * .55, 340), 560));
    const svg = drawing("svg", {viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "bytes"});
    const list = [...(node.below ? node.below.values() : [node])].sort((a, b) => b.bytes - a.bytes);
    const most = 300, items = list.slice(0, most);
    if (list.length > most) items.push({name: `${list.length - most} more`, bytes: list.slice(most).reduce((sum, one) => sum + one.bytes, 0)});
    const leaves = squares(items, 0, 0, width, height).map(({item, x, y, width: w, height: h}) => {
      const words = `${item.name}: ${size(Math.round(item.bytes))}, ${(100 * item.bytes / Math.max(node.bytes, 1)).toPrecision(3)} %`;
      const act = () => { if (item.below) { state.path = [...state.path, item.name]; paint(true); } else if (item.tensor !== undefined) opened([item.tensor]); };
      const rect = told(words, drawing("rect", {class: "leaf", tabindex: 0, role: "button", "aria-label": words, x, y, width: w, height: h, fill: item.fill || kindColour(item.name.replace(/\d+/g, "#")),
        onclick: act, onfocus: () => { line.textContent = words; }, onmouseover: () => { line.textContent = words; },
        onkeydown: event => { if (event.key === "Enter") act(); if (event.key === "Backspace" && state.path.length) { state.path.pop(); paint(true); } }}));
      svg.append(rect);
      const fits = Math.floor((w - 8) / 6.2);
      if (fits > 2 && h > 16) svg.append(drawing("text", {class: "on", x: x + 4, y: y + 13}, item.name.length > fits ? item.name.slice(0, fits - 1) + "…" : item.name));
      if (fits > 6 && h > 32) svg.append(drawing("text", {class: "on", x: x + 4, y: y + 27}, size(Math.round(item.bytes))));
      return rect;
    });
    area.replaceChildren(svg);
    if (focus && leaves[0]) leaves[0].focus();
  };
  section.append(element("div", {class: "controls"}, choice("bytes by", [["name", "name"], ["file", "file"], ["rank", "rank"]], "name", name => { state.by = name; state.path = []; paint(); })), trail, line, area);
  paint();
};

// Steps.
draw.steps = section => {
  const {steps, kinds, hyperparameters} = data.steps;
  const planesOf = [...new Set(kinds.map(({name}) => name[1] ? `${name[0]}: ${name[1]}` : name[0]))];
  const state = {statistic: "rms", plane: planesOf[0]};
  const area = element("div", {class: "cards"}), table = element("div", {class: "scroll"});
  const curve = values => {
    const width = 240, height = 90, finite = values.map(number).filter(one => one !== null && Number.isFinite(one));
    const svg = drawing("svg", {viewBox: `-4 -6 ${width + 8} ${height + 26}`, role: "img", "aria-label": values.map(shown).join(", ")});
    if (!finite.length) return svg;
    let low = Math.min(...finite), high = Math.max(...finite);
    if (low === high) { low -= Math.abs(low) * .05 || 1; high += Math.abs(high) * .05 || 1; }
    const at = (k, one) => [values.length > 1 ? width * k / (values.length - 1) : width / 2, height - height * (one - low) / (high - low)];
    const points = values.map((one, k) => [k, number(one)]).filter(([, one]) => one !== null && Number.isFinite(one));
    svg.append(drawing("line", {class: "axis", x1: 0, x2: width, y1: height, y2: height}),
      drawing("polyline", {class: "curve", points: points.map(([k, one]) => at(k, one).join()).join(" ")}),
      ...points.map(([k, one]) => told(`step ${steps[k]}: ${shown(one)}`, drawing("circle", {class: "dot", cx: at(k, one)[0], cy: at(k, one)[1], r: 3.5}))),
      drawing("text", {x: 0, y: height + 14}, String(steps[0])), drawing("text", {x: width, y: height + 14, "text-anchor": "end"}, String(steps[steps.length - 1])));
    return svg;
  };
  const paint = () => {
    area.replaceChildren(...kinds.filter(({name}) => (name[1] ? `${name[0]}: ${name[1]}` : name[0]) === state.plane).map(({name, values}) => {
      const list = values[state.statistic].map(number), first = list.find(one => one !== null), last = list[list.length - 1];
      const drift = (from, since) => from && last !== null ? `, ${last >= from ? "+" : ""}${shown(Number((100 * (last / from - 1)).toPrecision(3)))} % from ${since}` : "";
      return element("figure", {}, element("figcaption", {}, named(name[2]), element("div", {class: "soft"},
        `${shown(first)} → ${shown(last)}` + drift(first, "the first step") + (list.length > 2 ? drift(list[list.length - 2], "the previous one") : ""))), curve(values[state.statistic]));
    }));
  };
  const rows = [...new Set(hyperparameters.flatMap(one => Object.keys(one)))];
  table.append(element("table", {}, element("thead", {}, element("tr", {}, element("th", {}, "step"), ...steps.map(step => element("th", {class: "number"}, String(step))))),
    element("tbody", {}, element("tr", {}, element("th", {scope: "row"}, "findings"), ...data.steps.findings.map(n => element("td", {class: "number"}, String(n)))),
      ...rows.map(name => element("tr", {}, element("th", {scope: "row"}, name), ...hyperparameters.map((one, k) =>
        element("td", {class: "number", ...(k && one[name] !== hyperparameters[k - 1][name] ? {style: "font-weight:600"} : {})}, one[name] ?? "–")))))));
  section.append(element("div", {class: "controls"},
    choice("of", planesOf.map(name => [name, name]), state.plane, name => { state.plane = name; paint(); }),
    choice("statistic", Object.keys(kinds[0].values).map(name => [name, name]), state.statistic, name => { state.statistic = name; paint(); })), area,
    element("h2", {}, "Hyper-parameters"), table);
  paint();
};

// Pages and keys.
const links = [...document.querySelectorAll("nav a")], pages = links.map(link => link.dataset.page);
function ensure(name) {
  const section = document.getElementById(`page-${name}`);
  if (section.children.length || !draw[name]) return;
  section.append(element("h2", {}, section.getAttribute("aria-label")));
  draw[name](section);
}
function show() {
  const [wanted, ...rest] = location.hash.slice(1).split("/"), name = pages.includes(wanted) ? wanted : "summary";
  pages.forEach((page, k) => {
    document.getElementById(`page-${page}`).hidden = page !== name;
    if (page === name) links[k].setAttribute("aria-current", "page"); else links[k].removeAttribute("aria-current");
  });
  ensure(name);
  if (name === "tensor") {
    let called = null;
    try { called = decodeURIComponent(rest.join("/")); } catch { called = null; }
    if (search.only && !called) search.refresh("");
    if (byName.has(called)) { search.detail(byName.get(called)); if (innerWidth < 700 || search.scrolls) document.getElementById("detail").scrollIntoView(); search.scrolls = true; }
  } else scrollTo(0, 0);
}
addEventListener("hashchange", show);
addEventListener("beforeprint", () => { pages.forEach(ensure); document.querySelectorAll("details").forEach(one => { one.open = true; }); });
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  if (event.key === "/" && pages.includes("tensor")) { location.hash = "tensor"; show(); search.focus(); event.preventDefault(); }
  const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!by || event.target.closest(".matrix")) return;
  const at = (pages.indexOf(links.find(link => link.hasAttribute("aria-current")).dataset.page) + by + pages.length) % pages.length;
  location.hash = pages[at];
  if (event.target.closest("nav")) links[at].focus();
});
document.querySelectorAll("a.to-tensor").forEach(link => { link.href = "#tensor/" + encodeURIComponent(link.dataset.name); });
show();
})();

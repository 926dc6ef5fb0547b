/**
 * Code that the views share: elements, units, one tooltip, one live region, fitted labels.
 *
 * Everything stands on `globalThis.jointcut`, called J in every script of this page. Text of the data reaches the
 * document as text nodes and attributes alone, never as HTML.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** Drawing functions by the kind of a section: `(element, section, page) => void`. */
  J.sections ??= {};

  /** Fills of up to nine groups, as CSS values; the ninth, a grey, is for the rest. */
  J.palette = Array.from({ length: 9 }, (_, index) => `var(--group-${index + 1})`);

  /** Outlines that go with `J.palette`: at least 3:1 against the surface in both themes. */
  J.outlines = Array.from({ length: 9 }, (_, index) => `var(--group-${index + 1}-line)`);

  // ------------------------------------------------------------------------------------------------ elements

  /**
   * Set attributes and append children; `onclick` and its like are listeners, false and null are left out.
   *
   * @param {Element} element
   * @param {Object<string, *>} attributes
   * @param {Array<Node|string|number|null|false|Array>} children
   * @returns {Element} the same element
   */
  function furnish(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
      if (typeof value === "function") element.addEventListener(name.replace(/^on/, ""), value);
      else if (value !== null && value !== undefined && value !== false)
        element.setAttribute(name, value === true ? "" : String(value));
    }
    for (const child of children.flat(Infinity)) {
      if (child !== null && child !== undefined && child !== false) element.append(child);
    }
    return element;
  }

  /**
   * Make an HTML element.
   *
   * @param {string} tag
   * @param {Object<string, *>} [attributes]
   * @param {...(Node|string|number|null|false|Array)} children
   * @returns {HTMLElement}
   */
  J.element = (tag, attributes, ...children) => furnish(document.createElement(tag), attributes, children);

  /**
   * Make an SVG element.
   *
   * @param {string} tag
   * @param {Object<string, *>} [attributes]
   * @param {...(Node|string|number|null|false|Array)} children
   * @returns {SVGElement}
   */
  J.svg = (tag, attributes, ...children) =>
    furnish(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  let ids = 0;

  /** An id that no other element of this page has. */
  J.id = (name) => `jointcut-${name}-${(ids += 1)}`;

  // --------------------------------------------------------------------------------------------------- units

  /** The unit for bytes up to `most`: its divisor and its name. Decimal units, as in Python. */
  J.byteUnit = (most) => {
    for (const [divisor, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
      if (Math.abs(most) >= 0.9995 * divisor) return { divisor, name };
    }
    return { divisor: 1, name: "B" };
  };

  /** A number with a number of decimals; halves are rounded to the even digit, as in Python. */
  function rounded(number, decimals) {
    const scaled = number * 10 ** decimals;
    const tie = (8 * number) % 1 === 0 && Math.abs(scaled % 1) === 0.5; // eighths are exact in binary
    return (tie ? (2 * Math.round(scaled / 2)) / 10 ** decimals : number).toFixed(decimals);
  }

  /** What follows a figure in bytes: " per device" for a program on several devices, else nothing. */
  J.per = "";

  /** Bytes as a sentence tells them: `47.2 MB`, on several devices `47.2 MB per device`. */
  J.bytes = (bytes) => J.size(bytes) + J.per;

  /** Bytes below a heading that says whose, with three figures and their unit, as Python writes them: `512 B`. */
  J.size = (bytes) => {
    const { divisor, name } = J.byteUnit(bytes);
    if (divisor === 1) return `${Math.round(bytes)} B`;
    const amount = bytes / divisor;
    const size = Math.abs(amount);
    if (size >= 999.5) return `${Number(rounded(amount, 0)).toLocaleString("en")} ${name}`;
    return `${rounded(amount, size >= 9.995 ? 1 : 2)} ${name}`;
  };

  /** The unit for seconds up to `most`: its divisor and its name. */
  J.secondUnit = (most) => {
    if (Math.abs(most) >= 0.9995) return { divisor: 1, name: "s" };
    return Math.abs(most) >= 0.9995e-3 ? { divisor: 1e-3, name: "ms" } : { divisor: 1e-6, name: "µs" };
  };

  /** Seconds with three figures, `1.23 ms`; microseconds are whole, `45 µs`, unless there are fewer than ten. */
  J.seconds = (seconds) => {
    if (seconds === 0) return "0 s";
    const { divisor, name } = J.secondUnit(seconds);
    const amount = seconds / divisor;
    const whole = String(Math.trunc(Math.abs(amount))).length;
    return `${rounded(amount, Math.max(0, 3 - whole))} ${name}`;
  };

  /** A number for people: `12,400`, and at most two decimals. */
  J.number = (number) => number.toLocaleString("en", { maximumFractionDigits: 2 });

  /** A count and its noun: `1 row`, `57 rows`. */
  J.count = (count, noun) => `${J.number(count)} ${noun}${count === 1 ? "" : "s"}`;

  // ------------------------------------------------------------------------------------------- text that fits

  const pen = document.createElement("canvas").getContext("2d");

  /** The width of a text in pixels, in the page's own font at `size` pixels and `weight`. */
  J.width = (text, size, weight = 400) => {
    pen.font = `${weight} ${size}px ${getComputedStyle(document.documentElement).fontFamily}`;
    return pen.measureText(text).width;
  };

  /**
   * Shorten a text in its middle until it is at most `room` pixels wide: its beginning and its end tell most.
   *
   * @param {string} text
   * @param {number} room in pixels
   * @param {number} size of the font in pixels
   * @param {number} [weight] of the font
   * @returns {string} the text, or its two ends around an ellipsis; "" where not even those fit
   */
  J.fitted = (text, room, size, weight = 400) => {
    if (J.width(text, size, weight) <= room) return text;
    const letters = Array.from(text);
    const first = (count) => letters.slice(0, count).join("");
    const last = (count) => letters.slice(letters.length - count).join("");
    const cut = (kept) => `${first(Math.ceil(kept / 2))}…${last(Math.floor(kept / 2))}`;
    let least = 1;
    let most = letters.length - 1;
    while (least < most) {
      const middle = Math.ceil((least + most) / 2);
      if (J.width(cut(middle), size, weight) <= room) least = middle;
      else most = middle - 1;
    }
    return least > 1 && J.width(cut(least), size, weight) <= room ? cut(least) : "";
  };

  /** A place in a source: its folder, its file with the line, and its function. */
  const PLACE = /^(.*?)([^/\\]*:\d+)( \(.+\))?$/;

  /** The file and the line of a place, without folder and function; any other text unchanged. */
  J.line = (name) => PLACE.exec(name)?.[2] ?? name;

  /** A place without its folders; any other name unchanged. */
  const brief = (name) => name.replace(PLACE, "$2$3");

  /**
   * A name that wraps where it does not fit, and is never cut. A place has no folders where none of `names` reads the
   * same without; the title then has them.
   */
  J.named = (name, names = []) => {
    const own = brief(name);
    const alike = names.some((other) => other !== name && brief(other) === own);
    const text = alike ? name : own;
    return J.element("span", { class: "named", title: text === name ? null : name }, text);
  };

  /** The content of one entry of a legend: its sign, its name, and a figure, below the name where there is no room. */
  J.legendEntry = (sign, name, figure, names) => [sign, J.element("span", { class: "legend-text" },
    J.named(name, names), J.element("span", { class: "figure" }, figure))];

  /** Whether two rectangles `{x, y, width, height}` touch. */
  J.meet = (a, b) =>
    a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;

  /**
   * Find a place for a label: the first of the wished ones that is free and shuns nothing, else the first that is free,
   * else the free one nearest to the first.
   *
   * @param {{width: number, height: number, at: Array<{x: number, y: number}>}} label its size, and the upper left
   *   corners that it would like, best first
   * @param {{x: number, y: number, width: number, height: number}} bounds which it must not leave
   * @param {Array<{x: number, y: number, width: number, height: number}>} taken what it must not touch
   * @param {Array<{x: number, y: number, width: number, height: number}>} [shunned] what it had better not touch
   * @returns {{x: number, y: number, width: number, height: number, wished: boolean}|null} null where nothing is free
   */
  J.place = ({ width, height, at }, bounds, taken, shunned = []) => {
    if (width > bounds.width || height > bounds.height) return null;
    const within = ({ x, y }) => ({
      x: Math.max(bounds.x, Math.min(x, bounds.x + bounds.width - width)),
      y: Math.max(bounds.y, Math.min(y, bounds.y + bounds.height - height)),
      width,
      height,
    });
    const clear = (place, of) => !of.some((other) => J.meet(place, other));
    const free = at.map(within).filter((place) => clear(place, taken));
    if (free.length > 0) return { ...(free.find((place) => clear(place, shunned)) ?? free[0]), wished: true };
    const first = within(at[0]);
    let [best, least] = [null, Infinity];
    for (let y = bounds.y; y <= bounds.y + bounds.height - height; y += 4) {
      for (let x = bounds.x; x <= bounds.x + bounds.width - width; x += 8) {
        const place = { x, y, width, height };
        const distance = Math.hypot(x - first.x, 2 * (y - first.y));
        if (distance < least && clear(place, taken)) [best, least] = [place, distance];
      }
    }
    return best && { ...best, wished: false };
  };

  /**
   * The axes of a plot, with their units and a grid.
   *
   * @param {{plot: Object, height: number, x: Function, y: Function}} frame the plot's box, and d3 scales onto it
   * @param {{x: string, y: string}} titles
   * @param {boolean} whole whether the first axis counts, and has no fractions and no grid
   * @returns {Array<SVGElement>}
   */
  J.axes = ({ plot, height, x, y }, titles, whole) => {
    const [foot, wide] = [plot.y + plot.height, plot.x + plot.width];
    const ticks = x.ticks(Math.max(2, plot.width / 100)).filter((tick) => !whole || Number.isInteger(tick));
    return [
      J.svg("line", { class: "base", x1: plot.x, x2: wide, y1: foot, y2: foot }),
      y.ticks(5).map((tick) => [
        J.svg("line", { class: tick === 0 ? "base" : "grid", x1: plot.x, x2: wide, y1: y(tick), y2: y(tick) }),
        J.svg("text", { class: "tick", x: plot.x - 8, y: y(tick) + 4, "text-anchor": "end" }, J.number(tick))]),
      ticks.map((tick) => [
        J.svg("line", { class: whole ? "base" : "grid", x1: x(tick), x2: x(tick), y1: whole ? foot : plot.y,
          y2: foot + 5 }),
        J.svg("text", { class: "tick", x: x(tick), y: foot + 18, "text-anchor": "middle" }, J.number(tick))]),
      J.svg("text", { class: "axis-title", x: 0, y: 12 }, titles.y),
      J.svg("text", { class: "axis-title", x: wide, y: height - 6, "text-anchor": "end" }, titles.x),
    ].flat(Infinity);
  };

  // ------------------------------------------------------------------------------------------------- tooltip

  const tip = { node: null, anchor: null, offset: null };

  /** The one tooltip of the page, made when it is first needed. */
  function tipNode() {
    if (!tip.node) {
      tip.node = J.element("div", { id: "jointcut-tooltip", class: "tooltip", role: "tooltip", hidden: true });
      (document.querySelector("main") ?? document.body).append(tip.node);
      document.addEventListener("keydown", (event) => event.key === "Escape" && J.tooltip.hide());
      addEventListener("scroll", () => tip.anchor && setTip(), { capture: true, passive: true });
    }
    return tip.node;
  }

  /** Put the tooltip beside its anchor, or its point of the anchor, inside the window; hide it if they have left. */
  function setTip() {
    const { node, anchor, offset } = tip;
    const box = anchor.getBoundingClientRect();
    if (box.bottom < 0 || box.top > innerHeight) return J.tooltip.hide();
    const { x, y } = offset ?? { x: box.width / 2, y: box.height / 2 };
    const apart = offset ? 16 : box.height / 2 + 8;
    const { offsetWidth: width, offsetHeight: height } = node;
    const room = { x: document.documentElement.clientWidth - width - 8, y: innerHeight - height - 8 };
    const beside = box.x + x + apart > room.x ? box.x + x - apart - width : box.x + x + apart;
    const left = offset ? beside : box.x + x - width / 2;
    const top = box.y + y + apart > room.y ? box.y + y - apart - height : box.y + y + apart;
    node.style.left = `${Math.max(8, Math.min(left, room.x))}px`;
    node.style.top = `${Math.max(8, Math.min(top, room.y))}px`;
  }

  J.tooltip = {
    /**
     * Show the tooltip for an element until `hide` or Escape.
     *
     * @param {Element} anchor the element that it describes
     * @param {Node|string|Array<Node|string>} content
     * @param {{x: number, y: number}} [point] where, in pixels of the window; else beside the anchor
     */
    show(anchor, content, point) {
      const node = tipNode();
      if (tip.anchor !== anchor) J.tooltip.hide();
      const box = anchor.getBoundingClientRect();
      Object.assign(tip, { anchor, offset: point ? { x: point.x - box.x, y: point.y - box.y } : null });
      anchor.setAttribute("aria-describedby", node.id);
      node.replaceChildren(...[content].flat());
      node.hidden = false;
      setTip();
    },

    /** Hide the tooltip, whosoever it is. */
    hide() {
      if (!tip.anchor) return;
      tip.anchor.removeAttribute("aria-describedby");
      tip.node.hidden = true;
      tip.anchor = null;
    },

    /** Whether the tooltip is shown, for this anchor if one is given. */
    shown: (anchor) => tip.anchor !== null && (anchor === undefined || anchor === tip.anchor),

    /**
     * Show the tooltip while the pointer is on an element or the keyboard's focus is.
     *
     * @param {Element} anchor
     * @param {() => (Node|string|Array<Node|string>)} content asked for each time
     */
    attach(anchor, content) {
      anchor.addEventListener("pointerenter", (event) =>
        J.tooltip.show(anchor, content(), { x: event.clientX, y: event.clientY }));
      anchor.addEventListener("focus", () => anchor.matches(":focus-visible") && J.tooltip.show(anchor, content()));
      for (const name of ["pointerleave", "blur"]) anchor.addEventListener(name, () => J.tooltip.hide());
    },

    /**
     * The usual content: a heading, fainter lines, and rows of names and figures.
     *
     * @param {string} heading
     * @param {Array<string>} lines empty ones are left out
     * @param {Array<{name: string, value: string, fill?: string, strong?: boolean}>} [rows]
     * @returns {Array<Node>}
     */
    content: (heading, lines, rows = []) => [
      J.element("strong", { class: "tooltip-heading" }, heading),
      ...lines.filter(Boolean).map((line) => J.element("span", { class: "tooltip-line" }, line)),
      rows.length > 0 && J.element("span", { class: "tooltip-rows" }, rows.map((row) => [
        J.element("span", { class: "swatch", style: row.fill ? `background: ${row.fill}` : "visibility: hidden" }),
        J.element("span", { class: row.strong ? "tooltip-name strong" : "tooltip-name" },
          J.named(row.name, rows.map(({ name }) => name))),
        J.element("span", { class: row.strong ? "figure strong" : "figure" }, row.value)])),
    ].filter(Boolean),
  };

  // ------------------------------------------------------------------------------------------ the live region

  let live = null;

  /** Have a screen reader say a text when it has a moment. */
  J.announce = (text) => {
    if (!live) {
      live = J.element("div", { class: "unseen", "aria-live": "polite", role: "status" });
      document.body.append(live);
    }
    live.textContent = text;
  };

  // ------------------------------------------------------------------------------------------------ manners

  /** Whether the reader asked for less motion. */
  J.still = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

  /**
   * Draw now, and again whenever the width of an element changes.
   *
   * @param {Element} element
   * @param {(width: number) => void} draw told the width in whole pixels
   * @returns {() => void} draws again at the present width
   */
  J.fit = (element, draw) => {
    let drawn = 0;
    const look = () => {
      const width = Math.floor(element.clientWidth);
      if (width > 0 && width !== drawn) draw((drawn = width));
    };
    look();
    new ResizeObserver(look).observe(element);
    return () => drawn > 0 && draw(drawn);
  };
})();

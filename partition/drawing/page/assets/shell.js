/**
 * Build the page: header, totals, navigation, one section per entry of the data, and the theme.
 *
 * Reads `title`, `subtitle`, `totals` and `sections`. Each section is drawn by `J.sections[kind]` in a task of its own,
 * so that the first can be seen while the last is being laid out; `data-ready` on the root says that all are drawn.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  const THEMES = ["auto", "light", "dark"];

  /** The button that goes from the system's theme to light to dark. */
  function themeButton() {
    const root = document.documentElement;
    const button = J.element("button", { type: "button", class: "theme" });
    const set = (theme) => {
      if (theme === "auto") root.removeAttribute("data-theme");
      else root.setAttribute("data-theme", theme);
      button.replaceChildren(J.element("span", { class: `theme-sign theme-${theme}`, "aria-hidden": "true" }),
        `Theme: ${theme}`);
      button.dataset.state = theme;
    };
    set("auto");
    button.addEventListener("click", () => {
      set(THEMES[(THEMES.indexOf(button.dataset.state) + 1) % THEMES.length]);
      J.announce(`Theme: ${button.dataset.state}`);
    });
    return button;
  }

  /**
   * A link to a place in this page, followed by script: in a notebook's frame the browser would leave the page.
   *
   * @param {string} id of the element to go to
   * @param {string} text
   * @param {string} [name] the link's class
   */
  function link(id, text, name) {
    const go = (event) => {
      event.preventDefault();
      const target = document.getElementById(id);
      target.scrollIntoView({ behavior: J.still() ? "auto" : "smooth" });
      target.focus({ preventScroll: true });
    };
    return J.element("a", { href: `#${id}`, class: name, onclick: go }, text);
  }

  /** The figures at the top, as a list of terms: those that matter most large, and the others small below them. */
  function totals(entries) {
    const row = (own, name) => own.length > 0 && J.element("dl", { class: name }, own.map(({ label, value, detail }) =>
      J.element("div", { class: "total" },
        J.element("dt", {}, label),
        J.element("dd", { class: "total-value" }, value),
        detail && J.element("dd", { class: "total-detail" }, detail))));
    if (entries.length === 0) return null;
    const [first, rest] = [entries.filter(({ main }) => main), entries.filter(({ main }) => !main)];
    return J.element("div", { class: "totals" }, row(first, "totals-first"), row(rest, "totals-rest"));
  }

  /** Shared by the views: the data, and events by which they talk. */
  function conversation(data) {
    const handlers = new Map();
    return {
      data,
      /** Have `handler(detail)` called for each event of this name. */
      on(event, handler) {
        handlers.set(event, [...(handlers.get(event) ?? []), handler]);
      },
      /** Tell all who listen. */
      emit(event, detail) {
        for (const handler of handlers.get(event) ?? []) handler(detail);
      },
    };
  }

  /** A section with its heading and lead, not yet drawn. */
  function frame(section) {
    const heading = `${section.id}-heading`;
    return J.element("section", { id: section.id, class: `view view-${section.kind}`, tabindex: "-1",
      "aria-labelledby": heading },
      J.element("h2", { id: heading }, section.title),
      section.lead && J.element("p", { class: "lead" }, section.lead));
  }

  /** Draw one section; an error is shown in its place, and told to the console. */
  function draw(element, section, page) {
    const body = element.appendChild(J.element("div", { class: "view-body" }));
    try {
      J.sections[section.kind](body, section, page);
    } catch (error) {
      body.replaceChildren(J.element("p", { class: "failure", role: "alert" },
        `This section could not be drawn: ${error.message}`));
      console.error(error);
    }
  }

  /** Draw the sections one after the other, each in a task of its own; then say that the page is ready. */
  function drawAll(elements, sections, page) {
    const next = (index) => {
      if (index === sections.length) {
        document.documentElement.dataset.ready = "true";
        return;
      }
      draw(elements[index], sections[index], page);
      setTimeout(next, 0, index + 1);
    };
    next(0);
  }

  /** On paper everything is open; afterwards what was closed is closed again. */
  function openForPrint() {
    let opened = [];
    addEventListener("beforeprint", () => {
      opened = [...document.querySelectorAll("details:not([open])")];
      for (const details of opened) details.open = true;
    });
    addEventListener("afterprint", () => {
      for (const details of opened) details.open = false;
    });
  }

  /** Say at which ends the navigation has more than its room shows; the style sheet fades those. */
  function tellMore(nav) {
    const look = () => {
      const hidden = nav.scrollWidth - nav.clientWidth - nav.scrollLeft;
      nav.classList.toggle("more-before", nav.scrollLeft > 1);
      nav.classList.toggle("more-after", hidden > 1);
    };
    nav.addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(nav);
  }

  /** Scroll the navigation until a link stands in its middle, or as near to it as there are links beyond. */
  function centre(nav, link) {
    const [room, own] = [nav.getBoundingClientRect(), link.getBoundingClientRect()];
    const left = nav.scrollLeft + own.x - room.x - (room.width - own.width) / 2;
    nav.scrollTo({ left, behavior: J.still() ? "auto" : "smooth" });
  }

  /**
   * The height in the window at which one reads: a quarter down, and towards the end of the page ever lower, so that
   * also short sections there have their turn.
   */
  function readingLine() {
    const whole = document.documentElement.scrollHeight - innerHeight;
    const last = Math.min(whole, 0.75 * innerHeight);
    const done = last > 0 ? Math.max(0, 1 - (whole - scrollY) / last) : 0;
    return innerHeight * (0.25 + 0.75 * done);
  }

  /** Mark in the navigation the section that is being read, and show its link; also one that the keyboard reaches. */
  function followReading(elements, links, nav) {
    let active;
    const look = () => {
      const line = readingLine();
      const link = links[elements.findLastIndex((element) => element.getBoundingClientRect().top <= line)];
      if (link === active) return;
      active?.removeAttribute("aria-current");
      active = link;
      active?.setAttribute("aria-current", "true");
      if (active) centre(nav, active);
    };
    addEventListener("scroll", look, { passive: true });
    new ResizeObserver(look).observe(document.body);
    nav.addEventListener("focusin", ({ target }) => target.matches(":focus-visible") && centre(nav, target));
  }

  /** Build the page out of its data. */
  J.start = () => {
    document.documentElement.toggleAttribute("data-framed", globalThis.parent !== globalThis);
    const data = JSON.parse(document.getElementById("jointcut-data").textContent);
    J.per = data.per ?? "";
    const elements = data.sections.map(frame);
    const links = data.sections.map((section) => link(section.id, section.title));
    const items = links.map((each) => J.element("li", {}, each));
    const nav = J.element("nav", { "aria-label": "Sections" }, J.element("ul", {}, items));
    document.body.append(
      link("main", "Skip to the report", "skip"),
      J.element("header", { class: "bar" }, nav, themeButton()),
      J.element("main", { id: "main", tabindex: "-1" },
        J.element("div", { class: "head" },
          J.element("h1", {}, data.title),
          J.element("p", { class: "subtitle" }, data.subtitle)),
        totals(data.totals),
        elements),
      J.element("footer", { class: "foot" }, "Written by jointcut. This file needs no network."));
    openForPrint();
    tellMore(nav);
    followReading(elements, links, nav);
    drawAll(elements, data.sections, conversation(data));
  };

  document.addEventListener("DOMContentLoaded", J.start);
})();

// Shared by all pages.
import {html, nothing} from './lit-html.js';

export const enc = encodeURIComponent;
const grouped = new Intl.NumberFormat('en-US');
export const num = n => (n == null ? '–' : grouped.format(Math.round(n)));
const brief = new Intl.NumberFormat('en-US', {notation: 'compact', maximumSignificantDigits: 3});
export const short = n => (n == null ? '–' : Math.abs(n) < 1e4 ? num(n) : brief.format(n));
export function speed(n) {
	if (n == null) return '–';
	if (n >= 1e4) return `${short(n)}/s`;
	if (n >= 10) return `${num(n)}/s`;
	if (n >= 1 || n === 0) return `${+n.toFixed(1)}/s`;
	return n * 60 >= 1 ? `${+(n * 60).toFixed(1)}/min` : `${+(n * 3600).toFixed(1)}/h`;
}
export const percent = (part, whole) => {
	if (!whole) return '0 %';
	const share = (100 * part) / whole;
	return part && part < whole ? `${Math.min(99.9, Math.max(0.1, share)).toFixed(1)} %` : `${share.toFixed(0)} %`;
};
export function span(ms) {
	if (ms == null) return '–';
	const s = Math.max(0, ms / 1e3);
	if (s < 1) return `${Math.round(ms)} ms`;
	if (s < 90) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
	if (s < 5400) return `${Math.round(s / 60)} min`;
	if (s < 48 * 3600) return `${Math.floor(s / 3600)} h ${Math.round((s % 3600) / 60)} min`;
	return `${Math.round(s / 86400)} days`;
}
const two = n => String(n).padStart(2, '0');
export function clock(ms, withSeconds = false) {
	const d = new Date(ms), now = new Date(here());
	const time = `${two(d.getHours())}:${two(d.getMinutes())}${withSeconds ? `:${two(d.getSeconds())}` : ''}`;
	return d.toDateString() === now.toDateString() ? time : `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${time}`;
}
export const ago = ms => (ms ? `${span(here() - ms)} ago` : '–');
export const plural = (n, noun) => `${num(n)} ${noun}${n === 1 ? '' : 's'}`;
export const bytes = n => (n < 1024 ? plural(n, 'byte') : n < 2 ** 20 ? `${(n / 1024).toFixed(1)} KiB` : `${(n / 2 ** 20).toFixed(1)} MiB`);
// A report stands still: its clock is that of the moment it was made.
const frozen = document.getElementById('report-data');
export const report = frozen ? JSON.parse(frozen.textContent) : null;
export const here = () => (report ? report.t : Date.now());

export const app = {
	me: null, state: report ? 'report' : 'connecting', seen: 0, error: '', frames: {}, points: {}, looks: {}, spans: {}, told: {}, toasts: [], dialog: null, draw() {},
};
let drawing = false;
export function redraw() {
	if (drawing) return;
	drawing = true;
	requestAnimationFrame(() => { drawing = false; app.draw(); });
}

export class Refused extends Error {
	constructor(status, problem) { super(problem.detail || problem.title || `status ${status}`); this.status = status; this.code = problem.code; }
}
export async function call(method, path, body) {
	const answer = await fetch(path, {
		method, body: JSON.stringify(body),
		headers: body === undefined ? {} : {'Content-Type': 'application/json'},
	});
	const text = await answer.text();
	let value = null;
	try { value = text ? JSON.parse(text) : null; } catch { value = {detail: text.slice(0, 200)}; }
	if (!answer.ok) throw new Refused(answer.status, value || {});
	return value;
}

// The live feed

let source = null, topics = '', hello = 0, polling = 0, closing = 0;
function keep(topic, told) {
	app.frames[topic] = told;
	app.told[topic] = Date.now();
	app.seen = Date.now();
	const point = Array.isArray(told.point?.[0]) ? told.point[0] : told.point;
	if (point?.length && (!told.status || isLive(told.status))) { // after its end a request stands still
		const known = (app.points[topic] ||= []);
		const last = known.at(-1);
		if (last && (point[0] < last[0] || point[1] + point[2] < last[1] + last[2])) known.length = 0;
		if (!last || point[0] > last[0]) known.push(point);
		if (known.length > 900) app.points[topic] = known.filter((_, i) => i > 450 || i % 2);
	}
	if (told.slots && told.spans) {
		const looks = (app.looks[topic] ||= []);
		if (!looks.length || told.t > looks.at(-1).t) looks.push({t: told.t, slots: told.slots});
		if (looks.length > 180) looks.shift();
		spans(topic, told.spans);
	}
}
// Leases that are over; most of a frame are known already.
function spans(topic, found) {
	const known = (app.spans[topic] ||= new Map()), oldest = Date.now() - 180000;
	for (const each of found) known.set(`${each[0]} ${each[1]} ${each[2]}`, each);
	for (const [key, each] of known) { if (each[3] > oldest && known.size < 12000) break; known.delete(key); }
}
function take(kind, data) {
	const {topic, told} = data;
	if (kind === 'past') {
		if (told.points) app.points[topic] = told.points;
		if (told.looks) { app.looks[topic] = told.looks; spans(topic, told.spans); }
	} else if (kind === 'gone' || kind === 'wrong') {
		app.frames[topic] = {problem: kind, says: told.says};
		app.seen = Date.now();
	} else if (kind === 'away') {
		app.state = 'server';
	} else {
		if (app.state !== 'polling') app.state = 'live';
		const before = app.frames[topic];
		keep(topic, told);
		if (kind === 'r' && before?.status && isLive(before.status) && !isLive(told.status)) toast(`${told.status.id} has ended: ${told.status.state}`);
	}
	redraw();
}
export const isLive = status => status.state === 'open' || status.state === 'loading';
export function watch(wanted) {
	if (report) return;
	const query = wanted.map(each => `topic=${enc(each)}`).join('&');
	if (query === topics) return;
	topics = query;
	for (const topic of Object.keys(app.frames)) if (!wanted.includes(topic)) { delete app.frames[topic]; delete app.points[topic]; delete app.looks[topic]; delete app.spans[topic]; }
	open();
}
function shut() {
	source?.close(); source = null; clearTimeout(hello); clearInterval(polling); polling = 0;
}
function open() {
	shut();
	if (!topics) return;
	source = new EventSource(`/v1/live?${topics}`);
	source.addEventListener('hello', () => { clearTimeout(hello); app.state = 'live'; app.seen = Date.now(); redraw(); });
	source.addEventListener('past', event => take('past', JSON.parse(event.data)));
	for (const kind of [...'qtvwxhrmfl', 'gone', 'wrong', 'away']) source.addEventListener(kind, event => take(kind, JSON.parse(event.data)));
	source.onerror = () => {
		// Only a refusal closes the stream for good.
		const closed = source?.readyState === 2;
		app.state = closed ? 'connecting' : 'away'; redraw();
		if (closed) { shut(); setTimeout(again, 400); }
	};
	hello = setTimeout(poll, 5000); // a proxy that holds frames back
}
async function again() {
	if (source || polling || document.hidden) return;
	const asked = topics;
	try {
		app.me = await call('GET', '/v1/me');
		await call('GET', `/v1/live?once&${asked}`);
		if (asked === topics) open();
	} catch (error) {
		if (asked !== topics) return;
		if (error.status === 401) { app.me = null; app.state = 'login'; topics = ''; } else {
			const wrong = error.status < 500;
			app.state = wrong ? 'live' : 'away';
			if (wrong) for (const topic of new URLSearchParams(asked).getAll('topic')) app.frames[topic] = {problem: 'wrong', says: error.message};
			setTimeout(again, wrong ? 15000 : 1500);
		}
		redraw();
	}
}
function poll() {
	if (app.state === 'live' || app.state === 'away') return;
	shut();
	app.state = 'polling';
	polling = setInterval(async () => {
		try {
			const answer = await fetch(`/v1/live?once&${topics}`);
			for (const frame of (await answer.text()).split('\n\n')) {
				const kind = /^event: (\w+)/m.exec(frame)?.[1], data = /^data: (.*)$/m.exec(frame)?.[1];
				if (kind && data) take(kind, JSON.parse(data));
			}
		} catch { app.state = 'away'; redraw(); }
	}, 2000);
}
document.addEventListener('visibilitychange', () => {
	clearTimeout(closing);
	if (report) return;
	if (document.hidden) closing = setTimeout(() => { shut(); app.state = 'hidden'; }, 30000);
	else if (!source && !polling && topics) { app.state = 'connecting'; open(); }
});
setInterval(() => { if (!document.hidden) redraw(); }, 1000);

export function toast(says, {bad = false, undo = null, seconds = 6} = {}) {
	const one = {says, bad, undo};
	app.toasts = [...app.toasts.slice(-3), one];
	setTimeout(() => { app.toasts = app.toasts.filter(each => each !== one); redraw(); }, seconds * 1000);
	redraw();
}
export function dismiss(one) { app.toasts = app.toasts.filter(each => each !== one); redraw(); }
export async function act(work, said) {
	try {
		const done = await work();
		if (said) toast(typeof said === 'function' ? said(done) : said);
		return done;
	} catch (error) {
		toast(error instanceof Refused ? error.message : 'the gateway does not answer', {bad: true});
		return null;
	}
}
export function ask(question) {
	return new Promise(resolve => {
		app.dialog = {...question, typed: '', back: document.activeElement, answer(yes) {
			const back = app.dialog?.back; app.dialog = null; redraw(); resolve(yes); setTimeout(() => back?.focus?.());
		}};
		redraw();
	});
}
export const mayChange = () => !report && app.me?.role === 'operator';

export function go(path, {replace = false} = {}) {
	const thing = () => location.pathname.split('/').slice(0, 3).join('/'), before = thing();
	history[replace ? 'replaceState' : 'pushState'](null, '', path);
	if (thing() !== before) window.scrollTo(0, 0);
	redraw();
}
window.addEventListener('popstate', redraw);
document.addEventListener('click', event => {
	const link = event.target.closest?.('a[href^="/"]');
	if (link && report) event.preventDefault();
	if (!link || report || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || link.hasAttribute('download') || link.target) return;
	event.preventDefault();
	go(link.getAttribute('href'));
});
export function withQuery(changes) {
	const query = new URLSearchParams(location.search);
	for (const [name, value] of Object.entries(changes)) value == null || value === '' ? query.delete(name) : query.set(name, value);
	const text = query.toString();
	return location.pathname + (text ? `?${text}` : '');
}
export const param = (name, otherwise = '') => new URLSearchParams(location.search).get(name) ?? otherwise;

export const btn = (text, act, kind = 'small', off = false) => html`<button class=${kind} ?disabled=${off} @click=${act}>${text}</button>`;
export const n = (k, v) => html`<td class="num" data-k=${k}>${v}</td>`;
export const dim = (v, size = 'small') => html`<span class="dim ${size}">${v}</span>`;
// A card with a title, and what stands at the right of it.
export const card = (title, note, body, kind = '') => html`<section class="card ${kind}"><header><h2>${title}</h2>${note}</header>${body}</section>`;
export const flat = body => html`<section class="card flat">${body}</section>`;
export const key = (kind, text, count) => html`<span><i class="key ${kind}"></i>${text}${count == null ? nothing : html` <b>${num(count)}</b>`}</span>`;
export const pathOf = id => `/v1/requests/${enc(id)}`;
export const heads = (...names) => html`<thead><tr>${names.map(name => html`<th scope="col" class=${name[0] === '#' ? 'num' : ''}>${name.replace('#', '')}</th>`)}</tr></thead>`;
export const chip = row => { const word = row.paused ? 'paused' : row.state; return html`<span class="chip ${word}">${word}</span>`; };
const share = (part, whole) => `width:${whole ? (100 * part) / whole : 0}%`;
export function progress(parts, big = false) {
	const {total, done, failed, running, retry} = parts;
	return html`<div class="progress ${big ? 'big' : ''}" role="img" aria-label="${percent(done + failed, total)} finished">
		<i class="p-done" .style=${share(done, total)}></i><i class="p-fail" .style=${share(failed, total)}></i><i class="p-run" .style=${share(running, total)}></i><i class="p-retry" .style=${share(retry, total)}></i></div>`;
}
export function command(text) {
	return html`<div class="cmd"><code tabindex="0" role="group" aria-label="command">${text}</code><button class="small" type="button" @click=${() => navigator.clipboard?.writeText(text).then(() => toast('copied'))}>copy</button></div>`;
}
function problem(frame) {
	return html`<div class="card empty" role="alert"><h1>${frame.problem === 'gone' ? 'Not here' : 'It cannot be shown'}</h1><p>${frame.says}</p>${app.me?.only ? '' : html`<p><a href="/q/${enc(app.queue || app.me?.queues[0])}/requests">all requests</a></p>`}</div>`;
}
// The frame of a topic, or what to show in its place.
export const shown = topic => { const frame = app.frames[topic]; return !frame ? [null, loading()] : frame.problem ? [null, problem(frame)] : [frame]; };
const loading = () => html`<div class="card empty" aria-busy="true">reading …</div>`;
export {html, nothing};

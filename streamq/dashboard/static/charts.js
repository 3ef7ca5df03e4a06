// Charts: lines with a band, the map of the input, the timeline.
import {html, svg, nothing} from './lit-html.js';
import {num, short, clock, here} from './core.js';

const LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

function ticks(most) {
	if (!(most > 0)) return [0, 1];
	const rough = most / 3, power = 10 ** Math.floor(Math.log10(rough));
	const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
	const found = [];
	for (let v = 0; v < most + step; v += step) found.push(v);
	return found;
}
function path(points, x, y) {
	return points.map(([t, v], i) => `${i ? 'L' : 'M'}${x(t).toFixed(1)} ${y(v).toFixed(1)}`).join('');
}
function area(points, x, y) {
	if (!points.length) return '';
	return `${path(points, x, y)}L${x(points.at(-1)[0]).toFixed(1)} ${y(0)}L${x(points[0][0]).toFixed(1)} ${y(0)}Z`;
}
// series: [{name, kind: 1..4, points: [[t, v]], fill}]; band: [[t, low, high]]
export function lines({series, band, until, marks = [], say = short, title, small}) {
	// A narrow chart has fewer units, a huge one more: so its words stay readable.
	const [W, H] = (small || innerWidth < 768 ? [360, 150] : [640, 176]).map(n => n * Math.max(1, innerWidth / 2600));
	const all = series.flatMap(each => each.points);
	if (all.length < 3) return html`<div class="charthold"><svg class="chart" viewBox="0 0 ${W} ${H}" aria-hidden="true"><line class="gridline" x1=${LEFT} x2=${W - RIGHT} y1=${H - BOTTOM} y2=${H - BOTTOM}></line></svg><div class="early">a curve appears while this page watches</div></div>`;
	const first = Math.min(...all.map(p => p[0])), last = Math.max(until || 0, ...all.map(p => p[0]));
	const steps = ticks(Math.max(...all.map(p => p[1]), ...(band || []).map(b => b[2])));
	const most = steps.at(-1);
	const x = t => LEFT + ((t - first) / Math.max(1, last - first)) * (W - LEFT - RIGHT);
	const y = v => TOP + (1 - v / most) * (H - TOP - BOTTOM);
	const times = W < 600 ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1], at = share => first + share * (last - first);
	const summary = `${title}: ${series.map(each => `${each.name} ${say(each.points.at(-1)?.[1] ?? 0)}`).join(', ')}`;
	return html`<svg class="chart" viewBox="0 0 ${W} ${H}" role="img" aria-label=${summary}>
		${steps.map(v => svg`<line class="gridline" x1=${LEFT} x2=${W - RIGHT} y1=${y(v)} y2=${y(v)}></line><text x=${LEFT - 6} y=${y(v) + 4} text-anchor="end">${short(v)}</text>`)}
		${times.map(share => svg`<text x=${x(at(share))} y=${H - 4} text-anchor=${share ? (share < 1 ? 'middle' : 'end') : 'start'}>${clock(at(share), last - first < 300000)}</text>`)}
		${band?.length ? svg`<path class="band" d=${`${path(band.map(b => [b[0], b[2]]), x, y)}${path([...band].reverse().map(b => [b[0], b[1]]), x, y).replace('M', 'L')}Z`}></path>` : ''}
		${marks.filter(([t]) => t >= first && t <= last).slice(0, 40).map(([t, text]) => svg`<g class="mark"><line class="now" x1=${x(t)} x2=${x(t)} y1=${TOP} y2=${H - BOTTOM}></line><path d=${`M${x(t) - 4} ${TOP - 7}h8l-4 7z`}></path><title>${clock(t, true)} ${text}</title></g>`)}
		${until ? svg`<line class="now" x1=${x(here())} x2=${x(here())} y1=${TOP} y2=${H - BOTTOM}></line>` : ''}
		${series.map(each => svg`${each.fill ? svg`<path class="a${each.kind}" d=${area(each.points, x, y)}></path>` : ''}<path class="l${each.kind}" d=${path(each.points, x, y)} vector-effect="non-scaling-stroke"></path>`)}
	</svg>${numbers(['time', ...series.map(each => each.name)], thin(series[0].points).map(([t], i, some) => {
		const then = series.map(each => say(each.points.findLast?.(p => p[0] <= t)?.[1] ?? 0));
		return [clock(t, true), ...then];
	}))}`;
}
const thin = points => points.filter((_, i) => i % Math.ceil(points.length / 20) === 0 || i === points.length - 1);
export function numbers(heads, rows) {
	return html`<details class="numbers"><summary>as numbers</summary><div class="scroll" tabindex="0" role="region" aria-label="numbers"><table><thead><tr>${heads.map((h, i) => html`<th scope="col" class=${i ? 'num' : ''}>${h}</th>`)}</tr></thead><tbody>${rows.map(row => html`<tr>${row.map((v, i) => html`<td class=${i ? 'num' : ''}>${v}</td>`)}</tr>`)}</tbody></table></div></details>`;
}
export function speeds(points) {
	const found = [];
	for (let i = 1, from = 0; i < points.length; i++) {
		while (from < i - 1 && points[i][0] - points[from][0] > 6000) from++;
		const ms = points[i][0] - points[from][0];
		if (ms >= 500) found.push([points[i][0], Math.max(0, ((points[i][1] + points[i][2] - points[from][1] - points[from][2]) / ms) * 1e3)]);
	}
	return found;
}
export function spark(counts, kind = '') {
	const most = Math.max(1, ...counts), width = 144 / counts.length;
	return html`<svg class="spark ${kind}" viewBox="0 0 144 24" role="img" aria-label=${kind ? `by time: ${counts.join(', ')}` : 'where along the input'}><rect class="base" x="0" y="22" width="144" height="2"></rect>${counts.map((n, i) => (n ? svg`<rect x=${i * width} y=${22 - Math.max(3, (n / most) * 22)} width=${Math.max(1.5, width - 0.5)} height=${Math.max(3, (n / most) * 22)}></rect>` : nothing))}</svg>`;
}

// A colour as the page has it now: light-dark() is settled only where it is used.
function paint(element, name) {
	const before = element.tip.style.color;
	element.tip.style.color = `var(${name})`;
	const found = getComputedStyle(element.tip).color;
	element.tip.style.color = before;
	return found;
}
const paints = (element, names) => Object.fromEntries(names.split(' ').map(name => [name, paint(element, `--${name}`)]));
class Picture extends HTMLElement {
	connectedCallback() {
		if (!this.canvas) {
			this.canvas = document.createElement('canvas');
			this.tip = document.createElement('div');
			this.tip.className = 'tip';
			this.append(this.canvas, this.tip);
			this.canvas.tabIndex = 0;
			this.canvas.setAttribute('role', this.role_ || 'application');
			this.canvas.addEventListener('mousemove', event => this.over(event.offsetX, event.offsetY));
			this.canvas.addEventListener('click', event => this.chosen(event.offsetX, event.offsetY));
			this.canvas.addEventListener('keydown', event => this.key(event));
			this.sizes = new ResizeObserver(() => this.draw());
			this.sizes.observe(this);
			this.scheme = matchMedia('(prefers-color-scheme: dark)');
			this.scheme.addEventListener('change', () => this.draw());
		}
		this.draw();
	}
	disconnectedCallback() { this.sizes?.disconnect(); this.canvas = null; this.replaceChildren(); }
	set data(value) { this._data = value; if (this.canvas) this.draw(); }
	get data() { return this._data; }
	// Pictures grow with the text: one unit is a pixel where text has 14.
	get unit() { return parseFloat(getComputedStyle(this).fontSize) / 14; }
	begin(height) {
		const scale = devicePixelRatio || 1, width = Math.max(50, this.clientWidth);
		if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
			this.canvas.width = Math.round(width * scale); this.canvas.height = Math.round(height * scale);
			this.canvas.style.height = `${height}px`;
		}
		const c = this.canvas.getContext('2d');
		c.setTransform(scale, 0, 0, scale, 0, 0);
		c.clearRect(0, 0, width, height);
		return c;
	}
	over() {} chosen() {} key() {} draw() {}
}
// The map: one cell stands for so many parts, in input order.
class MapPicture extends Picture {
	draw() {
		const map = this.data;
		if (!map || !this.canvas) return;
		const width = Math.max(50, this.clientWidth), u = this.unit, target = Math.max(6, Math.min(16 * u, Math.sqrt((width * 190 * u) / Math.max(1, map.cells))));
		this.columns = Math.max(1, Math.min(map.cells, Math.floor(width / target)));
		const step = Math.min(16 * u, width / this.columns), gap = step > 7 ? 1.5 : 1, rows = Math.ceil(map.cells / this.columns);
		this.step = step;
		const c = this.begin(Math.max(step, rows * step) + 1);
		const color = paints(this, 'done run retry fail wait text card');
		this.marks = new Map(map.marks.map(mark => [mark[0], mark]));
		for (let cell = 0; cell < map.cells; cell++) {
			const x = (cell % this.columns) * step, y = Math.floor(cell / this.columns) * step, size = step - gap;
			const from = cell * map.size, to = Math.min(map.total, from + map.size);
			const handed = Math.max(0, Math.min(1, (map.delivered - from) / (to - from)));
			const mark = this.marks.get(cell);
			c.fillStyle = color.wait; c.fillRect(x, y, size, size);
			if (handed) { c.fillStyle = color.done; c.fillRect(x, y, size * handed, size); }
			if (mark) {
				const [, running, retry, failed] = mark, parts = to - from;
				if (running) { c.fillStyle = color.run; c.fillRect(x, y, size, Math.max(size / 2, (size * running) / parts)); }
				if (retry) { c.fillStyle = color.retry; c.beginPath(); c.moveTo(x, y + size); c.lineTo(x + size, y + size); c.lineTo(x + size, y); c.fill(); }
				if (failed) {
					const inner = size * Math.max(0.45, Math.sqrt(failed / parts));
					c.fillStyle = color.fail; c.fillRect(x + (size - inner) / 2, y + (size - inner) / 2, inner, inner);
					if (inner > 6) { c.strokeStyle = color.card; c.lineWidth = 1.2; c.beginPath(); c.moveTo(x + size * 0.36, y + size * 0.36); c.lineTo(x + size * 0.64, y + size * 0.64); c.moveTo(x + size * 0.64, y + size * 0.36); c.lineTo(x + size * 0.36, y + size * 0.64); c.stroke(); }
				}
			}
			if (cell === this.at) { c.strokeStyle = color.text; c.lineWidth = 2; c.strokeRect(x + 1, y + 1, size - 2, size - 2); }
		}
		this.canvas.setAttribute('aria-label', `Map of ${num(map.total)} parts in input order, ${num(map.size)} to a cell. Arrow keys move, Enter opens a cell.`);
		if (this.at == null) this.tip.textContent = `one cell is ${map.size === 1 ? 'one part' : `${num(map.size)} parts`}; choose one to see what is in it`;
		else this.tell();
	}
	cell(x, y) { const cell = Math.floor(y / this.step) * this.columns + Math.min(this.columns - 1, Math.floor(x / this.step)); return cell >= 0 && cell < this.data.cells ? cell : null; }
	over(x, y) { if (this.data) { const cell = this.cell(x, y); if (cell !== this.at && cell != null) { this.at = cell; this.draw(); } } }
	range() { const map = this.data, from = this.at * map.size + 1; return [from, Math.min(map.total, from + map.size - 1)]; }
	tell() {
		const [from, to] = this.range(), mark = this.marks.get(this.at) || [0, 0, 0, 0], map = this.data;
		const waiting = Math.max(0, to - Math.max(map.delivered, from - 1)), parts = to - from + 1;
		const words = [`part${parts > 1 ? 's' : ''} ${num(from)}${parts > 1 ? ` – ${num(to)}` : ''}`];
		for (const [n, word] of [[mark[1], 'running'], [mark[2], 'in retry'], [mark[3], 'failed'], [waiting, 'waiting']]) if (n) words.push(`${num(n)} ${word}`);
		const done = parts - waiting - mark[1] - mark[2] - mark[3];
		if (done > 0) words.push(`${num(done)} done`);
		this.tip.textContent = words.join(' · ');
	}
	open() { if (this.at != null) { const [from, to] = this.range(); this.dispatchEvent(new CustomEvent('open', {detail: {from, to}})); } }
	chosen(x, y) { if (this.data) { this.at = this.cell(x, y); this.draw(); this.open(); } }
	key(event) {
		const moves = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Home: -1e9, End: 1e9};
		if (event.key in moves) { event.preventDefault(); this.at = Math.max(0, Math.min(this.data.cells - 1, (this.at ?? -1) + moves[event.key])); this.draw(); }
		if (event.key === 'Enter') this.open();
	}
}
customElements.define('sq-map', MapPicture);

// Requests get colours in the order they come: no two of eight have the same.
const hues = new Map();
export const hue = id => `h${((hues.get(id) ?? (hues.set(id, hues.size), hues.size - 1)) % 8) + 1}`;
// The timeline: a row for each slot, a bar for each lease.
class TimePicture extends Picture {
	draw() {
		const {looks, ended} = this.data || {};
		if (!looks?.length || !this.canvas) return;
		const rows = new Map(), row = name => rows.get(name) || rows.set(name, []).get(name), edge = new Map();
		for (const [worker, slot, from, to, request, done, failed, retried] of ended) {
			const name = `${worker} ${slot}`;
			row(name).push({from, to, request, done, failed, retried});
			if (to > (edge.get(name) || 0)) edge.set(name, to);
		}
		// Looks show a lease that goes on, and slots whose worker does not tell.
		for (const look of looks) for (const [worker, slot, request] of look.slots) {
			const name = `${worker} ${slot}`;
			if (look.t < (edge.get(name) || 0) + 2500) continue; // it may have ended by now
			const bars = row(name), last = bars.at(-1);
			if (last && last.open && last.request === request && look.t - last.to < 2600) last.to = look.t + 1000; else bars.push({request, from: look.t, to: look.t + 1000, open: true});
		}
		this.rows = [...rows.entries()].sort(([a], [b]) => a.localeCompare(b, 'en', {numeric: true})).slice(0, 120);
		const u = this.unit, height = 20 * u, left = Math.min(170 * u, this.clientWidth * 0.3), width = this.clientWidth - left - 4;
		const c = this.begin(this.rows.length * height + 22 * u);
		const last = looks.at(-1).t + 1000, oldest = Math.min(...this.rows.flatMap(([, bars]) => bars.map(bar => bar.from)));
		const first = Math.min(last - 15000, Math.max(last - 60000, oldest));
		Object.assign(this, {first, last, left, width, height_: height});
		this.x = t => left + ((t - first) / (last - first)) * width;
		c.font = `${11 * u}px system-ui, sans-serif`;
		const color = paints(this, 'dim line card h1 h2 h3 h4 h5 h6 h7 h8');
		this.rows.forEach(([name, bars], i) => {
			const top = i * height;
			c.fillStyle = color.line; c.fillRect(left, top + height - 1, width, 1);
			c.fillStyle = color.dim; c.textAlign = 'right'; const most = Math.floor((left / u - 12) / 6.6); c.fillText(name.length > most ? `…${name.slice(1 - most)}` : name, left - 8, top + 14 * u);
			for (const bar of bars) {
				if (bar.to < first) continue;
				const x = Math.max(left, this.x(bar.from)), w = Math.max(1.5, Math.min(this.x(bar.to), left + width) - x - 0.7);
				c.fillStyle = color[hue(bar.request)];
				c.beginPath(); c.roundRect(x, top + 3, w, height - 7, Math.min(3, w / 2)); c.fill();
				c.fillStyle = color.card; c.textAlign = 'left';
				const sign = bar.failed ? '▲' : bar.retried ? '△' : '';
				if (w > 9 * u && sign) c.fillText(sign, x + 1, top + 14 * u);
				else if (bar.failed) { c.fillRect(x, top + 6, w, 3); }
				if (w > 70 * u) c.fillText(bar.request.slice(0, Math.floor(w / 7 / u) - 2), x + (sign ? 14 * u : 5), top + 14 * u);
			}
		});
		c.fillStyle = color.dim;
		const ticks = width > 420 * u ? 4 : 2;
		for (let i = 0; i <= ticks; i++) { c.textAlign = i === ticks ? 'right' : i ? 'center' : 'left'; c.fillText(clock(first + ((last - first) * i) / ticks, true), left + (width * i) / ticks, this.rows.length * height + 16 * u); }
		this.canvas.setAttribute('aria-label', `Timeline of ${this.rows.length} slots. Arrow keys move from slot to slot.`);
		if (!this.tip.textContent) this.tip.textContent = 'a bar is one lease: the time a slot served one request';
	}
	say(row, t) {
		const found = this.rows?.[row];
		if (!found) return;
		const bar = t == null ? found[1].at(-1) : found[1].findLast(each => t >= each.from && t <= each.to);
		const counts = bar && !bar.open ? [[bar.done, 'done'], [bar.failed, 'failed'], [bar.retried, 'run again']].filter(([n]) => n).map(([n, word]) => `, ${num(n)} ${word}`).join('') : '';
		this.tip.textContent = !bar ? `${found[0]}: nothing was seen to run` : `${found[0]}: ${bar.request}, ${clock(bar.from, true)}, ${bar.open ? 'goes on' : `${num(bar.to - bar.from)} ms${counts}`}`;
		this.at = bar?.request;
	}
	over(x, y) { if (this.rows) this.say(Math.floor(y / this.height_), this.first + ((x - this.left) / this.width) * (this.last - this.first)); }
	chosen() { if (this.at) this.dispatchEvent(new CustomEvent('open', {detail: this.at})); }
	key(event) {
		const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
		if (step) { event.preventDefault(); this.row = Math.max(0, Math.min(this.rows.length - 1, (this.row ?? -1) + step)); this.say(this.row, null); }
		if (event.key === 'Enter') this.chosen();
	}
}
customElements.define('sq-time', TimePicture);

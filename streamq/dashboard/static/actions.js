// What operators change: each action shows its command, and asks before it destroys.
import {html, nothing, call, act, ask, toast, app, num, plural, command, redraw, go, enc, pathOf} from './core.js';

const MANY = 10000;

export const pause = id => act(() => call('POST', `${pathOf(id)}/pause`), `${id}: paused`);
export const resume = id => act(() => call('POST', `${pathOf(id)}/resume`), `${id}: goes on`);
export const release = id => act(() => call('POST', `${pathOf(id)}/release`), `${id}: released, all its parts may run`);
export async function share(id) {
	const shared = await act(() => call('POST', `${pathOf(id)}/share`, {}));
	if (!shared) return;
	const link = location.origin + shared.path;
	await ask({title: `A link to ${id}`, says: `Whoever has it sees this request, and nothing else, for ${shared.days} days; it changes nothing.`, yes: 'Done', command: link, only: true});
}
export async function cancel(status) {
	const left = status.parts.total - status.parts.done - status.parts.failed;
	const yes = await ask({
		title: `Cancel ${status.id}?`, says: `${plural(left, 'part')} will not be finished. Results that are there stay. This cannot be undone.`,
		yes: 'Cancel the request', danger: true, command: `streamq cancel ${status.id}`, typed_: left > MANY ? status.id : '',
	});
	if (yes) await act(() => call('POST', `${pathOf(status.id)}/cancel`), done => `${status.id}: cancelled, ${plural(done.parts, 'part')} not finished`);
}
export async function retry(status, which = {}, what = `all ${plural(status.parts.failed, 'failed part')}`, many = status.parts.failed) {
	const some = Object.keys(which).length;
	const yes = await ask({
		title: `Run failed parts of ${status.id} again?`, says: `This runs ${what} again, under the same numbers.`, yes: 'Run them again',
		command: some ? `curl -d '${JSON.stringify(which).replaceAll("'", "'\\''")}' ${location.origin}${pathOf(status.id)}/retry/some` : `streamq retry ${status.id}`, typed_: many > MANY ? status.id : '',
	});
	if (yes) await act(() => (some ? call('POST', `${pathOf(status.id)}/retry/some`, which) : call('POST', `${pathOf(status.id)}/retry`)), done => `${status.id}: ${plural(done.parts, 'part')} run again`);
}
export async function purge(status) {
	const yes = await ask({
		title: `Remove ${status.id}?`, says: `The request, its ${plural(status.results || 0, 'result')} and its failures are removed from the server now. This cannot be undone.`, yes: 'Remove it', danger: true,
		command: `streamq purge ${status.id}`, typed_: status.parts.total > MANY ? status.id : '',
	});
	if (yes && (await act(async () => { await call('DELETE', pathOf(status.id)); return true; }, `${status.id}: removed`))) go(`/q/${enc(status.queue)}/requests`);
}
export async function set(id, change, before, undoing = false) {
	if (!(await act(() => call('PATCH', pathOf(id), change)))) return;
	const told = Object.entries(change).map(([name, value]) => `${name} ${before[name]} → ${value}`).join(', ');
	toast(`${id}: ${told}`, {seconds: 10, undo: undoing ? null : () => set(id, before, change, true)});
}
const sending = new Set();
// Enter applies; arrows change it by one, with shift by ten.
export function edit({id, name, value, least, most}) {
	const apply = event => {
		const text = event.target.value.trim(), wanted = name === 'rate' ? text || 'off' : Number(text), one = `${id} ${name} ${wanted}`;
		if (name !== 'rate' && !(text && wanted >= least && wanted <= most && Number.isInteger(wanted))) { event.target.value = value; toast(`${name}: a whole number from ${num(least)} to ${num(most)}, not "${text}"`, {bad: true}); return; }
		event.target.value = text;
		// Enter is told twice: as a key, and as a change of the input.
		if (String(wanted) === String(value) || sending.has(one)) return;
		sending.add(one);
		set(id, {[name]: wanted}, {[name]: value}).finally(() => sending.delete(one));
	};
	const key = event => {
		if (event.key === 'Enter') apply(event);
		if (event.key === 'Escape') { event.target.value = value; event.target.blur(); }
		const step = {ArrowUp: 1, ArrowDown: -1}[event.key];
		if (step && name !== 'rate') { event.preventDefault(); event.target.value = Math.max(least, Math.min(most, Number(event.target.value) + step * (event.shiftKey ? 10 : 1))); }
	};
	const focused = document.activeElement?.dataset?.edit === `${id} ${name}`;
	return html`<label>${name}<input class="short" inputmode=${name === 'rate' ? 'text' : 'numeric'} data-edit="${id} ${name}" aria-describedby="edit-hint" .value=${focused ? document.activeElement.value : String(value)} @keydown=${key} @change=${apply}></label>`;
}
export function dialog() {
	const d = app.dialog;
	if (!d) return nothing;
	const ready = !d.typed_ || d.typed === d.typed_;
	return html`<dialog aria-labelledby="ask" @cancel=${event => { event.preventDefault(); d.answer(false); }}><form @submit=${event => { event.preventDefault(); if (ready) d.answer(true); }}>
		<h2 id="ask">${d.title}</h2><p>${d.says}</p>${d.command ? command(d.command) : ''}
		${d.typed_ ? html`<label>Type ${d.typed_} to confirm<input name="typed" autocomplete="off" .value=${d.typed} @input=${event => { d.typed = event.target.value; redraw(); }}></label>` : ''}
		<div class="row">${d.only ? nothing : html`<button type="button" @click=${() => d.answer(false)}>No, leave it</button>`}<button class="primary ${d.danger ? 'danger' : ''}" ?disabled=${!ready}>${d.yes}</button></div>
	</form></dialog>`;
}

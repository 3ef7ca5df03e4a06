-- release: end a lease that its holder gives back, or whose process is known to be dead.
--
--   running -> retry        everything pending under the lease, at the front
--   running -> failed       the part that crashed its worker once too often
--
-- KEYS[1]  meta      HASH    state, counts, policy, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  holders   HASH    call number and running part of each lease
-- KEYS[7]  tries     HASH    part number, what went wrong with it
-- KEYS[8]  partial   HASH    part number, outcomes so far
-- KEYS[9]  failed    HASH    part number, what was given up
-- KEYS[10] events    channel the end is published there
-- KEYS[11] gone      ZSET    holder that was released without a lease, scored by when (ms)
-- KEYS[12+] flow     of the other stages, as lib/flow.lua reads them
--
-- ARGV[1]  holder
-- ARGV[2]  call      number of this call under the lease; kept when it is repeated
-- ARGV[3]  crashed   number of the part that was running when its process died, or ""
-- ARGV[4]  failure   what to keep if that part is given up as poison
--
-- Returns  over, lost, late or the state of an ended request; tokens to push; their list;
--          when to look again
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(parts held)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include ending
-- @include giveup
-- @include window
-- @include flow
-- @include tree
-- @include handover

-- A claim may arrive up to ten minutes late; its holder's name is remembered for so long.
local GONE_MS = 600000

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], failed = KEYS[9], events = KEYS[10],
  gone = KEYS[11], flow = { unpack(KEYS, 12) },
}
local holder, call, crashed, failure = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local now = now_ms()
local f, refused_flow = enter_flow(k, r, now)
if refused_flow then
  return refused_flow
end
local refused = refusal(k, r, holder, call)
if refused and refused[1] == "lost" then
  -- The claim of this holder may still arrive, and would grant a lease that no process knows of.
  redis.call("ZREMRANGEBYSCORE", k.gone, "-inf", now - GONE_MS)
  redis.call("ZADD", k.gone, now, holder)
  redis.call("PEXPIRE", k.gone, GONE_MS)
end
if refused then
  return refused
end

local before = 0
if f then
  load_more(k.meta, r)
  before = r.total - r.done - r.failed
end
local is_held = crashed ~= "" and #redis.call("XPENDING", k.parts, "w", crashed, crashed, 1, holder) == 1
end_lease(k, holder)
if is_held then
  charge_crash(k, r, now, crashed, failure)
end
note_room_behind(f)
local mint, look = invite(k, r, now)
local others = f and leave_flow(f, before)
save(k.meta, r)
return { is_live(r) and "over" or r.state, mint, list_of(r), look, others or nil }

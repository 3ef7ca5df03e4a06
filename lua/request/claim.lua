-- claim: give a holder a lease and parts to run under it.
--
--   waiting, retry -> running     parts
--
-- KEYS[1]  meta      HASH    state, limit, counts, rate, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[4]  retry     ZSET    part number, scored by when it may run again
-- KEYS[5]  holders   HASH    call number and running part of each lease
-- KEYS[6]  tries     HASH    part number, what went wrong with it
-- KEYS[7]  partial   HASH    part number, outcomes so far
-- KEYS[8]  gone      ZSET    holder that was released without a lease, scored by when (ms)
-- KEYS[9+] next      meta of the next stage of a flow, for its window
--
-- ARGV[1]  holder    a name never used before; kept when this call is repeated
-- ARGV[2]  level     of the list that the token came from, or -1 without a token
-- ARGV[3]  most      parts to hand out at most
-- ARGV[4]  max_bytes stop handing out new parts beyond this
-- ARGV[5]  lease_ms  how long the lease stands without a renewal
-- ARGV[6]  known     creation time of the request whose spec the caller knows, or 0
-- ARGV[7+] handlers  that the caller has: "parts NAME RETRIES" or "records NAME RETRIES";
--                    the retries count when the request does not say how many
--
-- Returns  ok, empty, limit, held, paused, handler, level, lost or the state of an ended request;
--          tokens to push; their list; when to look again; handler; and with parts: spec, or
--          "" when known; creation time; how long (ms) it has been there to be run;
--          troubles (number, tries, partial, mark, ...); and of the parts, if there are any: ids,
--          a line about each, the sizes of their payloads (I4), payloads, some of them joined
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(parts handed out)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include hand
-- @include window

local k = {
  meta = KEYS[1], parts = KEYS[2], leases = KEYS[3], retry = KEYS[4],
  holders = KEYS[5], tries = KEYS[6], partial = KEYS[7], gone = KEYS[8], next = { unpack(KEYS, 9) },
}
local holder, level, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, lease_ms, known = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.next)
if refused_flow then
  return refused_flow
end
local now = now_ms()

local function answer(word, mint, look, troubles, basket)
  save(k.meta, r)
  if not basket then
    return { word, mint, list_of(r), look, r.handler, "", 0, 0, {} }
  end
  -- The id alone does not identify the request: one of the same id may have been purged before.
  local created, spec, waited = r.created_ms, "", 0
  if created == 0 or created ~= known then
    spec = redis.call("HGET", k.meta, "spec")
  end
  if created > 0 then
    waited = math.max(0, now - math.max(created, r.hold_ms))
  end
  return { word, mint, list_of(r), look, r.handler, spec, created, waited, troubles, contents(basket) }
end

-- A refused token is dropped and not replaced: another is pushed when there is something to run.
local function refuse(word)
  local _, later = startable(k, r, now)
  return answer(word, 0, look_again(r, now, later))
end

-- Returns what the caller offers for the request's handler: its unit, and its retries.
local function offer()
  for i = 7, #ARGV do
    local unit, name, retries = string.match(ARGV[i], "^(%a+) (%S+) ?(%d*)$")
    if name == r.handler then
      return unit, tonumber(retries)
    end
  end
  return nil
end

-- Every claim uses up its token. Tokens of a former level were written off when the level changed.
if level == r.level then
  put(r, "out", math.max(0, r.out - 1))
end
if leases_of(k, r) > 0 and redis.call("ZSCORE", k.leases, holder) then
  -- The reply was lost. The deadline moves, so that the holder is not reaped for the time that
  -- took.
  redis.call("ZADD", k.leases, "XX", now + lease_ms, holder)
  local basket, troubles = hand_again(k, holder)
  note_room(k, r, k.next)
  local mint, look = invite(k, r, now)
  return answer("ok", mint, look, troubles, basket)
end
if not is_live(r) then
  return answer(r.state, 0, 0)
end
if redis.call("ZSCORE", k.gone, holder) then
  -- This claim came after its own release: no caller waits for the answer, and none would end the
  -- lease.
  return refuse("lost")
end
if level >= 0 and level ~= r.level then
  return answer("level", 0, 0)
end
if r.paused == 1 then
  return answer("paused", 0, 0)
end
local unit, retries = offer()
if not unit then
  -- A stray token: tokens of the request go only to workers that have its handler.
  return answer("handler", 0, 0)
end
if leases_of(k, r) >= limit_of(r, now) then
  return refuse("limit")
end
if blocked_until(r, now) > now then
  return refuse("held")
end
if r.unit == "" then
  put(r, "unit", unit)
  if r.retries < 0 then
    put(r, "retries", retries or 3)
  end
end

local is_first = r.delivered == 0
note_room(k, r, k.next)
local basket, troubles = hand(k, r, now, holder, most, max_bytes)
take_room(r, basket)
if #basket.ids == 0 then
  redis.call("XGROUP", "DELCONSUMER", k.parts, "w", holder)
  return refuse("empty")
end
redis.call("ZADD", k.leases, now + lease_ms, holder)
redis.call("HSET", k.holders, holder, 0)
r.leases = r.leases + 1
if lease_ms > r.lease_ms then
  put(r, "lease_ms", lease_ms)
end
if is_first then
  put(r, "started_ms", now)
end
local mint, look = invite(k, r, now)
return answer("ok", mint, look, troubles, basket)

-- reap: take back parts of holders whose lease expired and who were silent for a grace.
--
--   running -> retry        parts, at the front, each to be handed out alone if its worker died
--   running -> failed       a part that has cost too many workers
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
-- KEYS[11+] flow     of the other stages, as lib/flow.lua reads them
--
-- ARGV[1]  limit     leases to reap at most; fewer when they have very many parts
-- ARGV[2]  failure   what to keep of a part that is given up as poison
-- ARGV[3+] heard     pool, ms since its last heartbeat, pool, ms, ...
--
-- Returns  leases reaped; parts taken back; state; tokens to push; their list; when to look
--          again
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(parts taken back): PARTS_AT_ONCE, and those of one lease
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
-- @include suspicion
-- @include window
-- @include flow
-- @include tree
-- @include handover

-- About so many parts may keep the server busy in one call.
local PARTS_AT_ONCE = 500

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], failed = KEYS[9], events = KEYS[10],
  flow = { unpack(KEYS, 11) },
}
local limit, failure = tonumber(ARGV[1]), ARGV[2]
local heard = {}
for i = 3, #ARGV, 2 do
  heard[ARGV[i]] = tonumber(ARGV[i + 1])
end

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local now = now_ms()
local f, refused_flow = enter_flow(k, r, now)
if refused_flow then
  return refused_flow
end
local before = 0
if f then
  load_more(k.meta, r)
  before = r.total - r.done - r.failed
end

-- Returns whether the holder's pool was heard after the deadline of the lease. A dead pool was not:
-- it renewed its leases until it died. A live pool renews all leases of its processes and charges
-- its own dead (release). So if it was heard, a failover has undone the end of this lease, or the
-- pool cannot reach this server. Only durations are compared, because another server's clock timed
-- the heartbeat.
local function is_pool_alive(holder, deadline)
  local silent_ms = heard[string.match(holder, "^(%x+)%.")]
  return silent_ms and now - silent_ms > tonumber(deadline)
end

-- Returns whether the parts may never have come to a worker. The holders of gateways have names that
-- begin with "g". A gateway renews a lease when its worker was told of the parts, and a renewal says
-- what runs. So without that word the gateway died before, and no part is to blame.
local function is_undelivered(holder, said)
  return not said and string.sub(holder, 1, 1) == "g"
end

-- Returns the part that ran when the holder died: the one it named last, or the only one it had.
local function running_of(numbers, said)
  if #numbers == 1 then
    return numbers[1]
  end
  for _, number in ipairs(numbers) do
    if number == said then
      return number
    end
  end
  return nil
end

-- The entry in `tries` of a part that must be handed out alone. Most parts have no entry before.
local FIRST_ALONE = tries_text({ errors = 0, crashes = 0, alone = 1, run = 0, records = 0 })
local function alone_text(text)
  local t = read_tries(text)
  t.alone = 1
  return tries_text(t)
end

-- Marks parts to be handed out alone from now on, except the one that is charged.
local function set_apart(numbers, running)
  for start = 1, #numbers, MOST_HELD do
    local some = { unpack(numbers, start, math.min(#numbers, start + MOST_HELD - 1)) }
    local flat = {}
    for i, text in ipairs(redis.call("HMGET", k.tries, unpack(some))) do
      if some[i] ~= running then
        flat[#flat + 1] = some[i]
        flat[#flat + 1] = text and alone_text(text) or FIRST_ALONE
      end
    end
    if #flat > 0 then
      redis.call("HSET", k.tries, unpack(flat))
    end
  end
end

local expired = {}
local latest = reap_until(r, now, suspected_since(k.meta, now))
if latest then
  expired = redis.call("ZRANGEBYSCORE", k.leases, "-inf", latest, "WITHSCORES", "LIMIT", 0, limit)
end
local reaped, taken = 0, 0
for i = 1, #expired, 2 do
  local holder, deadline = expired[i], expired[i + 1]
  local said = redis.call("HGET", k.holders, holder .. "#")
  local numbers = end_lease(k, holder)
  reaped, taken = reaped + 1, taken + #numbers
  if not is_pool_alive(holder, deadline) and not is_undelivered(holder, said) then
    local running = running_of(numbers, said)
    set_apart(numbers, running)
    if running then
      charge_crash(k, r, now, running, failure)
    end
  end
  if taken >= PARTS_AT_ONCE then
    break
  end
end
note_room_behind(f)
local mint, look = invite(k, r, now)
local others = f and leave_flow(f, before)
save(k.meta, r)
return { reaped, taken, r.state, mint, list_of(r), look, others or nil }

-- audit: work out afresh how many tokens should be out, whatever was believed.
--
--   (changes beliefs only)  request, since when its holders are suspected to be dead, and its curve
--
-- KEYS[1]  meta      HASH    state, limit, counts, tokens believed out
-- KEYS[2]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[3]  retry     ZSET    part number, scored by when it may run again
-- KEYS[4]  pace      STRING  points of the curve, 24 bytes each
-- KEYS[5+] next      meta of the next stage of a flow, for its window
--
-- ARGV[1]  pushed    tokens that the caller found missing after its last audit, and has pushed
--
-- Returns  state; queue; tokens that should be out; their list; when to look again; leases
--          that may be reaped; when the request may be purged (0: it has not ended, or leases
--          stand); entries in its stream that were not ours, since the last audit; leases past
--          their deadline; tokens that were believed out; then name, value, ... of what most
--          requests do not have: weight; owed: 1 when callbacks of its end are to be started, and
--          it is not to be closed before; overdue_by: ms since its deadline
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
--          FLOW      the caller does not know that it is a stage of a flow, or which shape
-- Cost     O(log leases)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include suspicion
-- @include window
-- @include pace

local k = { meta = KEYS[1], leases = KEYS[2], retry = KEYS[3], pace = KEYS[4] }
k.next = { unpack(KEYS, 5) }
local pushed = tonumber(ARGV[1])

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local refused_flow = untold(k.meta, r, k.next)
if refused_flow then
  return refused_flow
end

local now = now_ms()
local believed = r.out + pushed
put(r, "out", 0)
put(r, "due_ms", 0)
note_room(k, r, k.next)
local want, look = invite(k, r, now)
-- `out` is never more than was believed or pushed. Tokens that the caller will find missing are not
-- out yet, and another caller of mint must not be told that they are. A belief that is too low only
-- makes a token too many.
put(r, "out", math.min(believed, want))

-- Notes since when leases are past their deadline, and returns how many of them may be reaped.
local function suspect(overdue)
  local since = suspected_since(k.meta, now)
  if overdue == 0 then
    redis.call("HDEL", k.meta, "suspected_ms", "looked_ms")
    return 0
  end
  put(r, "suspected_ms", since or now)
  put(r, "looked_ms", now)
  local latest = reap_until(r, now, since)
  return latest and redis.call("ZCOUNT", k.leases, "-inf", latest) or 0
end

local overdue = redis.call("ZCOUNT", k.leases, "-inf", now)
local expired = suspect(overdue)
-- Look also when the next lease would expire, so that parts of the dead do not wait for the next
-- round; and every second while leases are suspected.
local first = redis.call("ZRANGEBYSCORE", k.leases, "(" .. now, "+inf", "WITHSCORES", "LIMIT", 0, 1)
local next_look = tonumber(first[2])
if overdue > 0 then
  next_look = math.min(now + LOOK_EVERY_MS, next_look or math.huge)
end
if next_look and (look == 0 or next_look < look) then
  look = next_look
end
local purge_at = 0
-- Not while a lease stands: its holder may be dead, and nobody looks at a closed request.
local more = {}
if r.weight > 0 then
  more = { "weight", r.weight }
end
if not is_live(r) then
  load_more(k.meta, r)
end
if not is_live(r) and is_owed(r) then
  more[#more + 1], more[#more + 2] = "owed", 1
elseif not is_live(r) and overdue == 0 and not next_look then
  purge_at = r.finished_ms + r.keep_ms
end
note_pace(k, r, now)
save(k.meta, r)
local rest = redis.call("HMGET", k.meta, "queue", "strays", "deadline_ms")
local queue, strays, deadline = rest[1], tonumber(rest[2]) or 0, tonumber(rest[3])
if strays > 0 then
  redis.call("HDEL", k.meta, "strays")
end
if deadline and is_live(r) and deadline <= now then
  more[#more + 1], more[#more + 2] = "overdue_by", now - deadline
elseif deadline and is_live(r) and (look == 0 or deadline < look) then
  look = deadline
end
return { r.state, queue, want, list_of(r), look, expired, purge_at, strays,
  overdue, believed, unpack(more) }

-- refuse: count what cannot be loaded as a part that has failed, without a worker.
--
--   (absent) -> failed      the part that stands for it
--   waiting -> retry        parts before it, at the front
--   loading -> failed       request, when more failed than it tolerates
--
-- KEYS[1]  meta      HASH    state, counts, load cursor, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part, its id is the part's number
-- KEYS[3]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[4]  retry     ZSET    part number, scored by when it may run again
-- KEYS[5]  failed    HASH    part number, what was given up; `<n>!` for what was refused
-- KEYS[6]  events    channel the end is published there
--
-- ARGV[1]  number    of the part
-- ARGV[2]  after     load cursor that the load must stand at
-- ARGV[3]  cursor    where the load stands after what was refused; opaque
-- ARGV[4]  failure   what to keep of it
--
-- Returns  whether it is counted (0: call again); tokens to push; their list; when to look again
-- Errors   UNKNOWN   no such request
--          ENDED     the request takes no more parts
--          SHORT     the part does not follow those that are there
--          NEWER     a later version of streamq made the request
-- Cost     O(1,000 parts that wait)
-- Flags    none

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include ending

local k = {
  meta = KEYS[1], parts = KEYS[2], leases = KEYS[3], retry = KEYS[4], failed = KEYS[5],
  events = KEYS[6],
}
local number, after, cursor, failure = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
local stands = redis.call("HGET", k.meta, "cursor") or ""
if number <= r.total and redis.call("HEXISTS", k.failed, ARGV[1] .. "!") == 1 then
  return { 1, 0, list_of(r), 0 }
end
if r.state ~= "loading" then
  return redis.error_reply("ENDED the request is " .. r.state .. " and takes no more parts")
end
if number ~= r.total + 1 or after ~= stands then
  return redis.error_reply("SHORT the load stands at " .. stands .. ", part " .. r.total)
end

local now = now_ms()
load_more(k.meta, r)

-- Delivers the next entries to nobody: they wait at the front of `retry`, as parts that were handed
-- back do. Returns how many they are.
local function pass()
  local reply = redis.call("XREADGROUP", "GROUP", "w", PARKED, "COUNT", MOST_HELD, "STREAMS", k.parts, ">")
  local numbers = {}
  for i, entry in ipairs(reply and reply[1][2] or {}) do
    numbers[i] = number_of(entry[1])
  end
  return numbers
end

-- A part is handed out in the order of its number, so those before this one leave the line first.
-- Otherwise a worker would be handed this one, too.
if r.delivered < r.total then
  local numbers = pass()
  park(k, numbers)
  put(r, "delivered", #numbers > 0 and r.delivered + #numbers or r.total)
  r.smooth = nil
end
local is_counted = r.delivered >= r.total
if is_counted then
  redis.call("XADD", k.parts, number, "1", "")
  pass()
  redis.call("XACK", k.parts, "w", number)
  redis.call("XDEL", k.parts, number)
  redis.call("HSET", k.failed, ARGV[1] .. "!", failure)
  put(r, "total", number)
  put(r, "delivered", number)
  put(r, "cursor", cursor)
  put(r, "failed", r.failed + 1)
  put(r, "records_failed", r.records_failed + 1)
  redis.call("HINCRBY", k.meta, "records", 1)
  if is_intolerable(r, false) then
    end_request(k, r, now, "failed")
  end
end
local mint, look = invite(k, r, now)
save(k.meta, r)
return { is_counted and 1 or 0, mint, list_of(r), look }

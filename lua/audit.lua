-- audit: work out afresh which tokens should be out, whatever was believed.
--
--   (changes beliefs only)  request
--
-- KEYS[1]  meta      HASH    state, limit, counts, tokens believed out
-- KEYS[2]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[3]  retry     ZSET    part number, scored by when it may run again
--
-- ARGV[1]  pushed    tokens of it that the caller has pushed since it asked, and did not count
--
-- Returns  state; queue; tokens that should be out; their list; when to look again; leases
--          that have expired; when the request may be purged (0: it has not ended);
--          entries in its stream that were not ours, since the last audit; tokens that were
--          believed out
-- Errors   UNKNOWN   no such request
-- Cost     O(log leases)
-- Flags    allow-oom

-- @include clock
-- @include request
-- @include most_out
-- @include tokens

local k = { meta = KEYS[1], leases = KEYS[2], retry = KEYS[3] }
local pushed = tonumber(ARGV[1])

local r = load_request(k.meta)
if not r then
  return unknown()
end

local now = now_ms()
local believed = r.out + pushed
put(r, "out", 0)
put(r, "due_ms", 0)
local want, look = invite(k, r, now)
-- Never more than was believed or pushed: what the caller will find missing is not out yet, and whoever
-- mints meanwhile must not be told that it is. Too low a belief only makes a token too many.
put(r, "out", math.min(believed, want))
local expired = redis.call("ZCOUNT", k.leases, "-inf", now)
-- Also look when the first lease would expire, so that the dead do not wait for the next round.
local first = redis.call("ZRANGEBYSCORE", k.leases, "(" .. now, "+inf", "WITHSCORES", "LIMIT", 0, 1)
if first[2] and (look == 0 or tonumber(first[2]) < look) then
  look = tonumber(first[2])
end
local purge_at = 0
if not is_live(r) then
  load_more(k.meta, r)
  purge_at = r.finished_ms + r.keep_ms
end
save(k.meta, r)
local strays = tonumber(redis.call("HGET", k.meta, "strays")) or 0
if strays > 0 then
  redis.call("HDEL", k.meta, "strays")
end
return { r.state, redis.call("HGET", k.meta, "queue"), want, list_of(r), look, expired, purge_at, strays, believed }

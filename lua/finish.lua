-- finish: record the results of a batch, count it down, and hand over the next batch.
--
--   running -> done               parts
--   waiting, retry -> running     parts handed over
--   open -> done, failed          request, with its last part
--
-- KEYS[1]  meta      HASH    state, limit, counts, rate, tokens believed out
-- KEYS[2]  parts     STREAM  one entry per part
-- KEYS[3]  left      STRING  parts not finished, plus 1 while loading
-- KEYS[4]  leases    ZSET    holder, scored by the deadline (ms) of its lease
-- KEYS[5]  retry     ZSET    part number, scored by when it may run again
-- KEYS[6]  holders   HASH    call number and running part of each lease
-- KEYS[7]  tries     HASH    part number, what went wrong with it
-- KEYS[8]  partial   HASH    part number, outcomes so far
-- KEYS[9]  results   HASH    part number, result
-- KEYS[10] failed    HASH    part number, what was given up
-- KEYS[11] events    channel the end is published there
--
-- ARGV[1]  holder
-- ARGV[2]  call      number of this call under the lease; kept when it is repeated
-- ARGV[3]  most      parts to hand over at most; 0 ends the lease
-- ARGV[4]  max_bytes stop handing over new parts beyond this
-- ARGV[5]  lease_ms  how long the lease stands without a renewal
-- ARGV[6]  records   in all parts given
-- ARGV[7+] results   part number, result, part number, result
--
-- Returns  ok, over (the lease is), lost, late or the state of an ended request; tokens to
--          push; their level; when to look again; parts counted; troubles; lists of entries
-- Errors   UNKNOWN   no such request
-- Cost     O(parts given + parts handed over)
-- Flags    allow-oom

-- @include clock
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include hand
-- @include ending

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], results = KEYS[9], failed = KEYS[10],
  events = KEYS[11],
}
local holder, call, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, lease_ms, records = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local results = { unpack(ARGV, 7) }

local r = load_request(k.meta)
if not r then
  return unknown()
end
if r.state == "done" or r.state == "cancelled" then
  return { r.state, 0, r.level, 0, 0, {} }
end
local now = now_ms()
local counted = 0

-- Bookkeeping of parts that had trouble. What a redrive yields stands beside what the part
-- yielded before, which may not be collected yet.
local function settle_troubles(pairs_given, numbers)
  local texts = redis.call("HMGET", k.tries, unpack(numbers))
  for i, number in ipairs(numbers) do
    local run = read_tries(texts[i]).run
    if run > 0 then
      pairs_given[2 * i - 1] = number .. "." .. run
    end
  end
  redis.call("HDEL", k.tries, unpack(numbers))
  redis.call("HDEL", k.partial, unpack(numbers))
  redis.call("ZREM", k.retry, unpack(numbers))
end

-- Record parts whose XACK answered, so that each is counted by exactly one call.
local function record(pairs_given, number_of_records)
  local numbers = {}
  for i = 1, #pairs_given, 2 do
    numbers[#numbers + 1] = pairs_given[i]
  end
  if redis.call("EXISTS", k.tries, k.partial, k.retry) > 0 then
    settle_troubles(pairs_given, numbers)
  end
  redis.call("HSET", k.results, unpack(pairs_given))
  redis.call("XDEL", k.parts, unpack(numbers))
  counted = #numbers
  put(r, "done", r.done + counted)
  put(r, "records_done", r.records_done + number_of_records)
end

-- Record those of the results that pass, looked at one by one.
local function record_those(passes)
  local chosen, sum = {}, 0
  for i = 1, #results, 2 do
    local number = results[i]
    if passes(number) then
      local own = read_tries(redis.call("HGET", k.tries, number)).records
      sum = sum + (own > 0 and own or records_of(k.parts, number))
      chosen[#chosen + 1] = number
      chosen[#chosen + 1] = results[i + 1]
    end
  end
  if #chosen > 0 then
    record(chosen, sum)
  end
end

-- With the lease, the whole batch at once: XACK answers all of it, or 0 for a repeated call.
local function record_batch()
  local numbers = {}
  for i = 1, #results, 2 do
    numbers[#numbers + 1] = results[i]
  end
  local acked = redis.call("XACK", k.parts, "w", unpack(numbers))
  if acked == #numbers then
    record(results, records)
  elseif acked > 0 then
    -- Only a server that lost its last moments knows some and not others. The ones just
    -- acknowledged were delivered, and are neither deleted (that is done) nor given up.
    record_those(function(number)
      return tonumber(number) <= r.delivered
        and redis.call("HEXISTS", k.failed, number) == 0
        and #redis.call("XRANGE", k.parts, number, number) == 1
    end)
  end
end

-- Without a lease, only parts that nobody has taken since: they lie in `retry`.
local function record_mercifully()
  record_those(function(number)
    return redis.call("ZSCORE", k.retry, number) and redis.call("XACK", k.parts, "w", number) == 1
  end)
end

-- Hand over the next batch, or end the lease: a call that hands out nothing leaves none.
local function go_on()
  local room = redis.call("ZCARD", k.leases) <= r.limit
  if most > 0 and room and is_live(r) and r.paused == 0 and blocked_until(r) <= now then
    local lists, troubles, got = hand(k, r, now, holder, most, max_bytes)
    if got > 0 then
      redis.call("ZADD", k.leases, now + lease_ms, holder)
      return "ok", troubles, lists
    end
  end
  end_lease(k, holder)
  return "over", {}, {}
end

local lease = redis.call("ZSCORE", k.leases, holder)
if #results > 0 and lease then
  record_batch()
elseif #results > 0 then
  record_mercifully()
end
if counted > 0 and count_down(k, r, now, counted) then
  return { r.state, 0, r.level, 0, counted, {} }
end

local word, troubles, lists = "lost", {}, {}
if lease then
  local stored = tonumber(redis.call("HGET", k.holders, holder)) or 0
  if call > stored then
    redis.call("HSET", k.holders, holder, call)
    redis.call("HDEL", k.holders, holder .. "#")
    word, troubles, lists = go_on()
  elseif call == stored then
    word = "ok"
    redis.call("ZADD", k.leases, "XX", now + lease_ms, holder)
    lists, troubles = hand_again(k, holder)
  else
    word = "late"
  end
end
if not is_live(r) then
  word = r.state
end
local mint, look = invite(k, r, now)
save(k.meta, r)
return { word, mint, r.level, look, counted, troubles, unpack(lists) }

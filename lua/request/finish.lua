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
-- ARGV[6]  created   when the request was created whose parts these are, as claim told it
-- ARGV[7]  records   in all parts given
-- ARGV[8]  numbers   of the parts (I8)
-- ARGV[9]  sizes     of their results (I4)
-- ARGV[10] results   joined
--
-- Returns  ok, over (the lease is), lost, late or the state of an ended request; tokens to
--          push; their list; when to look again; parts counted; and of the parts handed over
--          what claim tells of them
-- Errors   UNKNOWN   no such request
--          NEWER     a later version of streamq made the request
-- Cost     O(parts given + parts handed over)
-- Flags    allow-oom

-- @include clock
-- @include version
-- @include request
-- @include most_out
-- @include tokens
-- @include lease
-- @include tries
-- @include hand
-- @include next_batch
-- @include ending
-- @include marks

local k = {
  meta = KEYS[1], parts = KEYS[2], left = KEYS[3], leases = KEYS[4], retry = KEYS[5],
  holders = KEYS[6], tries = KEYS[7], partial = KEYS[8], results = KEYS[9], failed = KEYS[10],
  events = KEYS[11],
}
local holder, call, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local max_bytes, lease_ms, created = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local records, numbers, sizes, results = tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10]

local given = #sizes / 4
numbers = { struct.unpack("<" .. string.rep("I8", given), numbers) }
-- The last value of struct.unpack is the position where it stopped.
numbers[given + 1] = nil
sizes = { struct.unpack("<" .. string.rep("I4", given), sizes) }

local r, newer = load_request(k.meta)
if not r then
  return newer or unknown()
end
if r.state == "done" or r.state == "cancelled" then
  return { r.state, 0, list_of(r), 0, 0, {} }
end
local now = now_ms()
local counted = 0

-- Clears the entries of parts that had trouble. The result of a redrive gets a field of its own,
-- since the part's earlier result may not be collected yet.
local function settle_troubles(fields, parts)
  local texts = redis.call("HMGET", k.tries, unpack(parts))
  for i, number in ipairs(parts) do
    local run = read_tries(texts[i]).run
    if run > 0 then
      fields[2 * i - 1] = string.format("%d.%d", number, run)
    end
  end
  redis.call("HDEL", k.tries, unpack(parts))
  forget_outcomes(k.partial, parts)
  redis.call("ZREM", k.retry, unpack(parts))
end

-- Records parts that XACK has just acknowledged, so that exactly one call counts each. `fields` has
-- numbers and results in turn.
local function record(fields, parts, number_of_records)
  r.smooth = redis.call("EXISTS", k.tries, k.partial, k.retry) == 0 or nil
  if not r.smooth then
    settle_troubles(fields, parts)
  end
  redis.call("HSET", k.results, unpack(fields))
  redis.call("XDEL", k.parts, unpack(parts))
  counted = #parts
  put(r, "done", r.done + counted)
  put(r, "records_done", r.records_done + number_of_records)
end

-- Returns numbers and results in turn, of all parts or of those that pass.
local function fields_of(passes)
  local fields, n, at = {}, 0, 1
  for i = 1, given do
    local after = at + sizes[i]
    if not passes or passes(numbers[i]) then
      fields[n + 1], fields[n + 2] = numbers[i], string.sub(results, at, after - 1)
      n = n + 2
    end
    at = after
  end
  return fields
end

-- Records those of the results that pass; each part is checked by itself.
local function record_those(passes)
  local parts, sum = {}, 0
  local fields = fields_of(function(number)
    if not passes(number) then
      return false
    end
    local own = read_tries(redis.call("HGET", k.tries, number)).records
    sum = sum + (own > 0 and own or records_of(k.parts, number))
    parts[#parts + 1] = number
    return true
  end)
  if #parts > 0 then
    record(fields, parts, sum)
  end
end

-- With the lease, records the whole batch at once: XACK counts all parts, or 0 for a repeated call.
local function record_batch()
  local acked = redis.call("XACK", k.parts, "w", unpack(numbers))
  if acked == given then
    record(fields_of(), numbers, records)
  elseif acked > 0 then
    -- Only a server that lost its last moments has acknowledged some of the parts and not others.
    -- Those acknowledged just now were delivered, and are neither deleted (done) nor given up.
    record_those(function(number)
      return number <= r.delivered
        and redis.call("HEXISTS", k.failed, number) == 0
        and #redis.call("XRANGE", k.parts, number, number) == 1
    end)
  end
end

-- Without a lease, records only parts in `retry`, which no other holder has taken since. The caller
-- has checked that they are not of an earlier request with the same id. After a redrive the result may
-- be of the run before, whose good records have been delivered already.
local function record_mercifully()
  record_those(function(number)
    return redis.call("ZSCORE", k.retry, number)
      and not has_delivered(k.parts, number, read_tries(redis.call("HGET", k.tries, number)))
      and redis.call("XACK", k.parts, "w", number) == 1
  end)
end

local lease = redis.call("ZSCORE", k.leases, holder)
if given > 0 and lease then
  record_batch()
elseif given > 0 and created == r.created_ms then
  record_mercifully()
end
if counted > 0 and count_down(k, r, now, counted) then
  return { r.state, 0, list_of(r), is_owed(r) and now or 0, counted, {} }
end

local stored = lease and (tonumber(redis.call("HGET", k.holders, holder)) or 0)
local word, basket, troubles = next_batch(k, r, now, holder, call, stored, {
  most = most, max_bytes = max_bytes, lease_ms = lease_ms,
})
if not is_live(r) then
  word = r.state
end
local mint, look = invite(k, r, now)
save(k.meta, r)
if not basket then
  return { word, mint, list_of(r), look, counted, {} }
end
return { word, mint, list_of(r), look, counted, troubles, contents(basket) }

-- How many tokens of a request should be out, and when to look at it again.
-- A token is an invitation to claim. The count of tokens that are "out" is a belief: it may be too
-- high or too low, which costs time, until the next audit corrects it.

-- Returns the list for the request's tokens, as the end of its key's name. Only workers that have
-- the handler take from it.
local function list_of(r)
  return string.format("%s:%02d", r.handler, r.level)
end

-- A rate may run ahead by 50 ms, so that one claim can hand out several parts: 49 here, and the
-- fraction of a millisecond that the clock cuts off.
local RATE_AHEAD_MS = 49

-- `rate_at_ms` may be ahead of now by the last charge and this much. If it is further ahead, the
-- server's clock has gone back since that charge.
local CLOCK_OFF_MS = 1000

-- Returns up to when the request's rate is spent. A charge of 0 is unknown: an earlier version made
-- it.
local function rate_at(r, now)
  local charge = r.rate_charge_ms
  if charge > 0 and r.rate_at_ms - now > charge + CLOCK_OFF_MS then
    return now
  end
  return r.rate_at_ms
end

-- Returns the moment from which the request may start parts: after a delayed start, a snooze, its
-- rate.
local function blocked_until(r, now)
  if r.rate_ms > 0 then
    return math.max(r.hold_ms, math.ceil(rate_at(r, now)) - RATE_AHEAD_MS)
  end
  return r.hold_ms
end

-- These cache in `r` the number of leases, and whether `retry` is empty, as for most requests. Each
-- is asked of the server once; code that changes one of them updates or clears the cached value. A
-- request that was never claimed has no leases and no retries, so both calls are skipped. Two
-- fields are tested for that: if a foreign write damaged one of them, trusting it alone would lift
-- the limit.
local function is_new(r)
  if r.new == nil then
    r.new = r.delivered == 0 and r.unit == ""
  end
  return r.new
end

local function leases_of(k, r)
  r.leases = r.leases or (is_new(r) and 0 or redis.call("ZCARD", k.leases))
  return r.leases
end

local function is_smooth(k, r)
  if r.smooth == nil then
    r.smooth = is_new(r) or redis.call("EXISTS", k.retry) == 0
  end
  return r.smooth
end

-- Returns the number of the last part that may start: all may, but for a canary that is not
-- released.
local function last_startable(r)
  return r.ceiling > 0 and math.min(r.ceiling, r.total) or r.total
end

-- Returns whether a canary holds back parts of `retry`: those that were never started (refuse). They
-- are at its front, scored by their numbers; parts that were put off are scored by a time.
local function holds_back(r)
  return r.ceiling > 0 and r.ceiling < r.total
end

-- Returns how many parts in `retry` could start now, and when the first of the others is due.
local function startable_retries(k, r, now)
  local first = is_smooth(k, r) and {} or redis.call("ZRANGE", k.retry, 0, 0, "WITHSCORES")
  local due = 0
  if first[2] and tonumber(first[2]) <= now then
    due = redis.call("ZCOUNT", k.retry, "-inf", now)
    if holds_back(r) then
      due = due - redis.call("ZCOUNT", k.retry, "(" .. r.ceiling, r.total)
    end
    first = due > 0 and {}
      or redis.call("ZRANGEBYSCORE", k.retry, "(" .. now, "+inf", "WITHSCORES", "LIMIT", 0, 1)
  end
  return due, tonumber(first[2]) or 0
end

-- Returns how many parts could start now, and the moment (0: none) at which more could.
local function startable(k, r, now)
  local ready = math.max(0, last_startable(r) - r.delivered)
  local due, later = startable_retries(k, r, now)
  ready = ready + due
  -- Of a stage of a flow: no more than the next stage has room for.
  if r.room and r.room < ready then
    ready = r.room
  end
  local blocked = blocked_until(r, now)
  if blocked > now and (ready > 0 or later > 0) then
    return 0, math.max(blocked, ready > 0 and 0 or later)
  end
  return ready, later
end

-- Returns the moment to register for another look, or 0 if an earlier one is registered already.
local function look_again(r, now, later)
  if later > 0 and (r.due_ms <= now or later < r.due_ms) then
    put(r, "due_ms", later)
    return later
  end
  return 0
end

-- Returns how many tokens of the request may be out at most. Tokens in a list are turns, so this is
-- the request's share among those of its level.
local function weight_of(r)
  return r.weight > 0 and r.weight or MOST_OUT
end

-- Every 10 s a limit that was eased grows by a fiftieth, at least by 1.
local EASED_STEP_MS = 10000

-- Returns how many leases the request may have now: its limit, or less for a while after a handler
-- held the request.
local function limit_of(r, now)
  if r.eased <= 0 then
    return r.limit
  end
  local steps = math.max(0, math.floor((now - r.eased_ms) / EASED_STEP_MS))
  return math.min(r.limit, r.eased + steps * math.max(1, math.floor(r.eased / 50)))
end

-- Eases the limit: a handler that holds the request found that too many run at once.
local function ease(k, r, now, until_ms)
  local at_once = math.min(limit_of(r, now), leases_of(k, r))
  put(r, "eased", math.max(1, math.floor(at_once * 0.85)))
  put(r, "eased_ms", until_ms)
end

-- Returns the earlier of a moment (0: none) and that at which an eased limit grows next, if parts
-- are ready: nobody calls then, so a look has to push the token.
local function or_growth(r, now, ready, later)
  if r.eased <= 0 or ready <= 0 or limit_of(r, now) >= r.limit then
    return later
  end
  local steps = math.max(0, math.floor((now - r.eased_ms) / EASED_STEP_MS))
  local grows = r.eased_ms + (steps + 1) * EASED_STEP_MS
  return later > 0 and math.min(later, grows) or grows
end

-- Returns how many tokens to push, and when to look again.
local function invite(k, r, now)
  if not is_live(r) then
    -- The script that ended the request has read what it owes: a janitor comes at once.
    return 0, r.owes and is_owed(r) and now or 0
  end
  if r.paused == 1 then
    return 0, 0
  end
  local ready, later = startable(k, r, now)
  local free = limit_of(r, now) - leases_of(k, r)
  local mint = math.max(0, math.min(free, ready, weight_of(r)) - math.max(0, r.out))
  if mint > 0 then
    put(r, "out", math.max(0, r.out) + mint)
  end
  return mint, look_again(r, now, or_growth(r, now, ready, later))
end

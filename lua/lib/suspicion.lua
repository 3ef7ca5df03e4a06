-- Which leases are over: those whose holder is dead.
-- A lease past its deadline is only suspected. It is over when its holder was silent for a grace in
-- which audits looked at the request again and again. After an outage, however long, every live
-- holder is heard within that grace: it can still renew a lease that is past its deadline.
local LOOK_EVERY_MS = 1000
-- After a longer time between two looks there may have been an outage, so the grace begins anew.
local MOST_BETWEEN_MS = 2000

-- Returns the grace: 3 s and a quarter of the lease (1 s to 10 s). A live holder is heard within it:
-- a renewal waits for its answer for a quarter of the lease (0.25 s to 3 s), and the next one is
-- sent 1 s later at most.
local function grace_ms(r)
  return 3000 + math.max(1000, math.min(10000, r.lease_ms / 4))
end

-- Returns since when every look found leases past their deadline; nil if the last look found none
-- or is too long ago, or if the clock went back since.
local function suspected_since(meta, now)
  local found = redis.call("HMGET", meta, "suspected_ms", "looked_ms")
  local since, last = tonumber(found[1]), tonumber(found[2])
  if since and last and since <= last and last <= now and now - last <= MOST_BETWEEN_MS then
    return since
  end
  return nil
end

-- Returns up to which deadline leases may be reaped; nil: none. A lease that passed its deadline
-- while others were suspected already gets a whole grace of its own.
local function reap_until(r, now, since)
  local latest = now - grace_ms(r)
  return since and since <= latest and latest or nil
end

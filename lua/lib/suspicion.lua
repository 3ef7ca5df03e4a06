-- A lease past its deadline is suspected, and over only when its holder kept silent for a grace in
-- which the server was looked at again and again. After an outage, however long, every holder that
-- lives is heard before that: it can renew a lease that is past its deadline.
local LOOK_EVERY_MS = 1000
-- A longer time between two looks may have been an outage: the grace begins anew.
local MOST_BETWEEN_MS = 2000

-- A holder that lives is heard within this: what one renewal waits for its answer (a quarter of
-- the lease, 10 s at most), the longest rest after a failed one (2 s), and the next.
local function grace_ms(r)
  return 3000 + math.max(1000, math.min(10000, r.lease_ms / 4))
end

-- Since when there were leases past their deadline at every look; nil: there were none at the
-- last look, or it is too long ago. A clock that went back tells nothing.
local function suspected_since(meta, now)
  local found = redis.call("HMGET", meta, "suspected_ms", "looked_ms")
  local since, last = tonumber(found[1]), tonumber(found[2])
  if since and last and since <= last and last <= now and now - last <= MOST_BETWEEN_MS then
    return since
  end
  return nil
end

-- Leases whose deadline is no later than this may be reaped; nil: none. A lease that passed its
-- deadline while others were suspected has the grace of its own.
local function reap_until(r, now, since)
  local latest = now - grace_ms(r)
  return since and since <= latest and latest or nil
end

-- What a holder gets that has told of its parts: the next batch, the last one again, or an end.

-- Hands over the next batch, or ends the lease: a call that hands out nothing leaves no lease.
local function go_on(k, r, now, holder, terms)
  local room = leases_of(k, r) <= limit_of(r, now)
  if terms.most > 0 and room and is_live(r) and r.paused == 0 and blocked_until(r, now) <= now then
    local basket, troubles = hand(k, r, now, holder, terms.most, terms.max_bytes)
    take_room(r, basket)
    if #basket.ids > 0 then
      redis.call("ZADD", k.leases, now + terms.lease_ms, holder)
      return "ok", basket, troubles
    end
  end
  end_lease(k, holder)
  r.leases, r.smooth = nil, nil
  return "over"
end

-- Returns the word for the holder, and the batch: a new one for a new call, the last one again if
-- the call is a repeat of it, none for an older call or without a lease. `stored` is the number of
-- the last call under the lease.
local function next_batch(k, r, now, holder, call, stored, terms)
  if not stored then
    return "lost"
  end
  if call > stored then
    redis.call("HSET", k.holders, holder, call)
    redis.call("HDEL", k.holders, holder .. "#")
    return go_on(k, r, now, holder, terms)
  end
  if call < stored then
    return "late"
  end
  redis.call("ZADD", k.leases, "XX", now + terms.lease_ms, holder)
  return "ok", hand_again(k, holder)
end

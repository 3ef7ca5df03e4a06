-- Ends a request: the end is recorded first and published second.
local function end_request(k, r, now, state)
  if r.flow then
    r.flow.end_all(r.flow, state)
  end
  put(r, "state", state)
  put(r, "finished_ms", now)
  save(k.meta, r)
  redis.call("SPUBLISH", k.events, state)
end

-- Returns whether more failed than the request tolerates. A percentage is judged only once 1,000
-- are finished, and at the end.
local function is_intolerable(r, at_end)
  local failed, done = r.failed, r.done
  if r.unit == "records" then
    failed, done = r.records_failed, r.records_done
  end
  if r.max_failures >= 0 and failed > r.max_failures then
    return true
  end
  local total = failed + done
  return r.max_percent >= 0 and (at_end or total >= 1000) and failed * 100 > r.max_percent * total
end

-- Subtracts finished parts from `left`; at 0 the request ends. Entries of failed parts stay for
-- redrive. Returns whether this was the end.
local function count_down(k, r, now, parts)
  if r.flow then
    return r.flow.count(r.flow, parts)
  end
  if redis.call("DECRBY", k.left, parts) > 0 or not is_live(r) then
    return false
  end
  load_more(k.meta, r)
  redis.call("UNLINK", k.leases, k.holders, k.retry)
  if r.failed == 0 then
    redis.call("UNLINK", k.parts, k.tries, k.partial)
  end
  end_request(k, r, now, is_intolerable(r, true) and "failed" or "done")
  return true
end

-- Gives a part up. Its entry stays (XACK without XDEL), so that redrive can take it back.
local function give_up(k, r, now, number, t, failure)
  if redis.call("XACK", k.parts, "w", number) == 0 then
    return
  end
  load_more(k.meta, r)
  redis.call("ZREM", k.retry, number)
  redis.call("HSET", k.failed, number, failure)
  t.alone = 0
  write_tries(k.tries, number, t)
  put(r, "failed", r.failed + 1)
  put(r, "records_failed", r.records_failed + t.records)
  if r.flow then
    r.flow.give_up(r.flow, number, t, failure)
  end
  count_down(k, r, now, 1)
  if is_live(r) and is_intolerable(r, false) then
    end_request(k, r, now, "failed")
  end
end

-- Returns at how many deaths a part is given up here. For a part of several records of a map, a
-- worker finds the record that kills workers by running the part in pieces of a sixteenth
-- (streamq/worker/pieces.py). After more than poison x (2 + log16 of its records) deaths the worker
-- gives up all that is left of the part. Another death means that it could not.
local function most_deaths(r, records)
  if r.unit ~= "records" or records <= 1 then
    return r.poison
  end
  local factor, reach = 2, 1
  while reach < records do
    factor, reach = factor + 1, reach * 16
  end
  return r.poison * factor + 2
end

-- Charges a part with the death of its worker. After too many deaths the part is given up.
local function charge_crash(k, r, now, number, failure)
  local t = read_tries(redis.call("HGET", k.tries, number))
  t.crashes, t.alone = t.crashes + 1, 1
  load_more(k.meta, r)
  local records = r.unit == "records" and records_of(k.parts, number) or 1
  if t.crashes < most_deaths(r, records) then
    write_tries(k.tries, number, t)
    return
  end
  if t.records == 0 then
    t.records = records_of(k.parts, number)
  end
  give_up(k, r, now, number, t, failure)
end

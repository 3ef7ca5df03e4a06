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
  count_down(k, r, now, 1)
  if is_live(r) and is_intolerable(r, false) then
    end_request(k, r, now, "failed")
  end
end

-- Charges a part with the death of its worker. At `poison` deaths the part is given up.
local function charge_crash(k, r, now, number, failure)
  local t = read_tries(redis.call("HGET", k.tries, number))
  t.crashes, t.alone = t.crashes + 1, 1
  load_more(k.meta, r)
  if t.crashes < r.poison then
    write_tries(k.tries, number, t)
    return
  end
  if t.records == 0 then
    t.records = records_of(k.parts, number)
  end
  give_up(k, r, now, number, t, failure)
end

-- A request as one table: read once, changed by put(), written once by save(). load_request() reads
-- the fields that every call needs, load_more() those that only some need.
local TEXTS = 3
local FIELDS = {
  "state", "handler", "unit",
  "paused", "level", "limit", "total", "bytes", "delivered", "done", "records_done",
  "out", "due_ms", "hold_ms", "rate_ms", "rate_at_ms", "rate_charge_ms", "retries", "created_ms",
  "lease_ms", "weight", "ceiling", "eased", "eased_ms", "protocol",
}
local MORE = {
  "failed", "records_failed", "poison", "max_failures", "max_percent",
  "finished_ms", "keep_ms", "redrives", "owes", "settled", "outlive_ms",
}

-- Returns the request; or nil if it is absent; or nil and the refusal if its version is too new.
local function load_request(meta)
  local values = redis.call("HMGET", meta, unpack(FIELDS))
  if not values[1] then
    return nil
  end
  local newer = newer_than_known(values[#FIELDS])
  if newer then
    return nil, newer
  end
  local r = { changes = {} }
  for i = 1, TEXTS do
    r[FIELDS[i]] = values[i] or ""
  end
  for i = TEXTS + 1, #FIELDS do
    r[FIELDS[i]] = tonumber(values[i]) or 0
  end
  return r
end

local function load_more(meta, r)
  if r.poison then
    return
  end
  for i, value in ipairs(redis.call("HMGET", meta, unpack(MORE))) do
    r[MORE[i]] = r[MORE[i]] or tonumber(value) or 0
  end
end

local function put(r, field, value)
  r[field] = value
  r.changes[field] = value
end

local function save(meta, r)
  local flat = {}
  for field, value in pairs(r.changes) do
    flat[#flat + 1] = field
    flat[#flat + 1] = value
  end
  if #flat > 0 then
    redis.call("HSET", meta, unpack(flat))
    r.changes = {}
  end
end

local function is_live(r)
  return r.state == "loading" or r.state == "open"
end

-- Returns whether callbacks of the request's last end are to be started. load_more() has read it.
local function is_owed(r)
  return not is_live(r) and r.owes > 0 and r.settled <= r.redrives
end

local function unknown()
  return redis.error_reply("UNKNOWN no such request, or it was purged")
end

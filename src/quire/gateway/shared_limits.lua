-- Limits of one tenant, shared by gateways. One call is one step: no other gateway sees it half done.
-- KEYS: state of the tenant; requests in flight by gateway.
-- ARGV: operation, gateway, completions, reserved, month, requests/minute, tokens/minute, tokens/day, concurrency,
--       budget (limits: -1 is none), seconds after which a silent gateway is forgotten, tokens, spent
local operation, gateway = ARGV[1], ARGV[2]
local num, reserved, month = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local limit = {tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])}
local concurrency, budget, silent = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local tokens, spent_now = tonumber(ARGV[12]), tonumber(ARGV[13])
local seconds = {60, 60, 86400}
local clock = redis.call('TIME')
local now = clock[1] + clock[2] / 1000000

local level = {}
for i = 1, 3 do
  local kept = redis.call('HMGET', KEYS[1], 'level' .. i, 'at' .. i, 'limit' .. i)
  level[i] = limit[i]
  if kept[1] and limit[i] >= 0 then
    local used = tonumber(kept[3]) - tonumber(kept[1])  -- of a limit that may have been changed
    level[i] = math.min(limit[i], limit[i] - used + (now - tonumber(kept[2])) * limit[i] / seconds[i])
  end
end
local spent = 0
local kept_month = redis.call('HGET', KEYS[1], 'month') or ''
if kept_month > month then
  month = kept_month  -- the clock of this gateway is behind: the month that has begun goes on
end
if kept_month == month then
  spent = tonumber(redis.call('HGET', KEYS[1], 'spent') or '0')
end

local running, held = 0, 0
local own_running, own_held = 0, 0
local all = redis.call('HGETALL', KEYS[2])
for i = 1, #all, 2 do
  local r, h, seen = string.match(all[i + 1], '^(%S+) (%S+) (%S+)$')
  if all[i] == gateway then
    own_running, own_held = tonumber(r), tonumber(h)
  elseif now - tonumber(seen) > silent then
    redis.call('HDEL', KEYS[2], all[i])
  else
    running, held = running + tonumber(r), held + tonumber(h)
  end
end

local admitted = 1
if operation == 'enter' then
  local over = concurrency >= 0 and running + own_running + num > concurrency
  for i = 1, 3 do
    over = over or (limit[i] >= 0 and level[i] < 1)
  end
  over = over or (budget >= 0 and spent + held + own_held >= budget)
  if over then
    admitted = 0
  else
    level[1] = level[1] - 1
    own_running, own_held = own_running + num, own_held + reserved
  end
elseif operation == 'settle' then
  own_running, own_held = math.max(own_running - num, 0), math.max(own_held - reserved, 0)
  level[2], level[3] = level[2] - tokens, level[3] - tokens
  spent = spent + spent_now
end

for i = 1, 3 do
  if limit[i] >= 0 then
    redis.call('HSET', KEYS[1], 'level' .. i, string.format('%.6f', level[i]), 'at' .. i, string.format('%.6f', now),
      'limit' .. i, limit[i])
  end
end
redis.call('HSET', KEYS[1], 'month', month, 'spent', string.format('%.0f', spent))
if own_running > 0 or own_held > 0 then
  redis.call('HSET', KEYS[2], gateway, string.format('%d %.0f %.6f', own_running, own_held, now))
else
  redis.call('HDEL', KEYS[2], gateway)
end
redis.call('EXPIRE', KEYS[1], 3456000)
redis.call('EXPIRE', KEYS[2], 3456000)
return {admitted, running + own_running, string.format('%.6f', level[1]), string.format('%.6f', level[2]),
  string.format('%.6f', level[3]), string.format('%.0f', spent), string.format('%.0f', held + own_held)}

-- Durable groups were written to a file. args: ids, forget (at once). Returns how many are still durable:
-- others were forgotten meanwhile, or came back because their steps were undone.
local marked = 0
for _, id in ipairs(args.ids) do
  if state_of(id) == 'durable' then
    marked = marked + 1
    if args.forget then
      forget('durable', {id}, tonumber(redis.call('ZSCORE', key('durable'), id)))
    else
      redis.call('HSET', key('about:' .. id), 'exported', 1)
    end
  end
end
return marked
